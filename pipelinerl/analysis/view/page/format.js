// Numbers as people read them.

const NONE = '–';

/** At most four significant digits. */
export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  if (Number.isInteger(value)) return value.toLocaleString('en-US');
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(digits - 2);
  return value.toLocaleString('en-US', {maximumSignificantDigits: digits});
}

export function percent(value) {
  return value === null || value === undefined ? NONE : `${(100 * value).toFixed(1)} %`;
}

/** `12 s`, `3 min 20 s`, `5 h 2 min` or `3 d 4 h`. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  const whole = Math.max(0, Math.round(seconds));
  for (const [size, large, part, small] of [
    [86400, 'd', 3600, 'h'],
    [3600, 'h', 60, 'min'],
    [60, 'min', 1, 's'],
  ]) {
    if (whole >= size) return `${Math.floor(whole / size)} ${large} ${Math.floor((whole % size) / part)} ${small}`;
  }
  return `${whole} s`;
}

/** `version 3`, `versions 3–5`, or a dash. */
export function versions(first, last) {
  if (first === null || first === undefined || first < 0) return NONE;
  return first === last ? `version ${first}` : `versions ${first}–${last}`;
}

export function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? '' : 's'}`;
}
