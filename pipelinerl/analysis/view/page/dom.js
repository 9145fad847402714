// Elements from plain values. Text always becomes a text node, so nothing that a model wrote is ever read as HTML.

/**
 * An element. `attributes`: `class`, `on` (listeners by event), properties of forms (`value`, `checked`, `disabled`), and
 * attributes; null and false are left out. `children`: nodes, texts, numbers, lists of these; null is left out.
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'on') Object.entries(value).forEach(([event, listener]) => element.addEventListener(event, listener));
    else if (['value', 'checked', 'disabled', 'selected'].includes(name)) element[name] = value;
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(
    ...children
      .flat(Infinity)
      .filter((child) => child !== null && child !== undefined && child !== false)
      .map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))),
  );
  return element;
}

/** Text of a model or of user code: it cannot change the direction of what stands around it. */
export function foreign(text, className = '') {
  return h('bdi', {class: `foreign ${className}`.trim()}, text);
}

/** A titled part of a view. */
export function panel(title, attributes, ...children) {
  const {class: className = '', ...rest} = attributes;
  return h(
    'section',
    {class: `panel ${className}`.trim(), 'aria-label': title, ...rest},
    h('h2', {}, title),
    ...children,
  );
}

/** A table that scrolls sideways if it is too wide. `columns`: titles, with # in front of numbers; `rows`: lists of cells. */
export function table(label, columns, rows) {
  const kind = (index) => (columns[index].startsWith('#') ? 'number' : null);
  const head = columns.map((title, index) => h('th', {scope: 'col', class: kind(index)}, title.replace('#', '')));
  const line = (cells) => h('tr', {}, ...cells.map((cell, index) => h('td', {class: kind(index)}, cell)));
  return h(
    'div',
    {class: 'scroll', tabindex: 0, role: 'region', 'aria-label': label},
    h('table', {}, h('thead', {}, h('tr', {}, head)), h('tbody', {}, rows.map(line))),
  );
}

/** A drop-down list of [value, text] with a label. */
export function choice(label, options, value, onChange, attributes = {}) {
  const select = h(
    'select',
    {...attributes, on: {change: (event) => onChange(event.target.value)}},
    options.map(([key, text]) => h('option', {value: key, selected: String(key) === String(value ?? '')}, text)),
  );
  return h('label', {class: 'field'}, h('span', {}, label), select);
}

/** A line that says that something could not be shown. */
export function failure(error) {
  return h('p', {class: 'failure', role: 'alert'}, foreign(error.message || String(error)));
}
