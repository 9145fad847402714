// The tokens of one sample, each colored by one of its numbers.

import {choice, failure, foreign, h} from './dom.js';
import {number} from './format.js';
import {ask} from './source.js';

const NOT_TRAINED = 'not trained';
/** By name: title, what the colors mean, and the color of a token: [hue variable, strength from 0 to 1] or null. */
const PAINTS = {
  logprobs: [
    'log-probability',
    'The stronger, the less likely the token was when it was sampled.',
    (token) => (token.logprob === null ? null : ['--token-warm', 1 - Math.exp(token.logprob)]),
  ],
  importance: [
    'importance ratio',
    'Blue: the weights in training find it more likely than those that sampled it, orange: less. The stronger, the larger the ratio.',
    (token) => ratioColor(token.importance, 5),
  ],
  ratios: [
    'ratio to the reference',
    'Blue: the reference model finds it more likely than the model that sampled it, orange: less. The stronger, the larger the ratio.',
    (token) => ratioColor(token.ratio, 1),
  ],
  advantage: [
    'advantage',
    'Green: above its group, red: below. The stronger, the farther.',
    (token) =>
      token.logprob === null || !token.advantage
        ? null
        : [token.advantage > 0 ? '--token-good' : '--token-bad', Math.min(1, 0.25 + Math.abs(token.advantage) / 2)],
  ],
  versions: [
    'weight version',
    'A new color, and a line with its number, begins where new weights arrived within the sequence.',
    (token) => (token.version === null ? null : [`--curve-${token.version % 6}`, 0.55]),
  ],
};

/** Full strength where the logarithm of `ratio` is 1 / `gain`. */
function ratioColor(ratio, gain) {
  return ratio === null
    ? null
    : [ratio > 1 ? '--token-cool' : '--token-warm', Math.min(1, gain * Math.abs(Math.log(ratio)))];
}

function tokenOf(answer, index) {
  return {
    text: answer.texts[index],
    index: answer.start + index,
    logprob: answer.logprobs[index],
    importance: answer.importance[index],
    ratio: answer.ratios[index],
    version: answer.versions[index],
    advantage: answer.advantage,
  };
}

function about(token) {
  if (!token) return 'Point at a token, or move with the arrow keys.';
  const facts = [`token ${token.index}`];
  if (token.version === null) return `${facts[0]}: ${NOT_TRAINED}`;
  facts.push(`version ${token.version}`);
  if (token.logprob !== null)
    facts.push(`log-probability ${number(token.logprob)}`, `probability ${number(Math.exp(token.logprob), 3)}`);
  if (token.importance !== null) facts.push(`importance ratio ${number(token.importance)}`);
  if (token.ratio !== null) facts.push(`ratio to the reference ${number(token.ratio)}`);
  if (token.advantage !== null) facts.push(`advantage ${number(token.advantage)}`);
  return facts.join(', ');
}

function paint(span, token, name) {
  const color = PAINTS[name][2](token);
  span.style.backgroundColor = color
    ? `color-mix(in srgb, var(${color[0]}) ${Math.round(70 * color[1])}%, transparent)`
    : '';
}

/** The tokens of sample `place` (`{source, offset, place, sample}`) of a run. */
export async function tokenView(base, place) {
  const info = h('p', {class: 'token-info', role: 'status'}, about(null));
  const text = h('div', {
    class: 'tokens foreign',
    tabindex: 0,
    role: 'group',
    'aria-label': 'Tokens. Arrow keys move.',
  });
  const legend = h('p', {class: 'quiet'});
  const more = h(
    'button',
    {type: 'button', hidden: true, on: {click: () => load().catch((error) => more.replaceWith(failure(error)))}},
    'Show more tokens',
  );
  const spans = [];
  const tokens = [];
  let mode = 'logprobs';
  let at = -1;
  let next = 0;

  function point(index) {
    if (index < 0 || index >= spans.length) return;
    spans[at]?.classList.remove('current');
    at = index;
    spans[at].classList.add('current');
    info.textContent = about(tokens[at]);
  }

  function color(name) {
    mode = name;
    legend.textContent =
      PAINTS[name][1] +
      (tokens.some((token) => PAINTS[name][2](token)) ? '' : ' Nothing of it is recorded for this sample.');
    if (name === 'versions') legend.append(...seen().map((version) => key(version)));
    spans.forEach((span, index) => paint(span, tokens[index], mode));
  }

  function seen() {
    return [...new Set(tokens.map((token) => token.version).filter((version) => version !== null))];
  }

  function key(version) {
    const swatch = h('span', {class: 'key'}, `version ${version}`);
    paint(swatch, {version}, 'versions');
    return swatch;
  }

  async function load() {
    const answer = await ask(`${base}/tokens`, {...place, start: next || null});
    answer.texts.forEach((_, index) => {
      const token = tokenOf(answer, index);
      const before = tokens.findLast((each) => each.version !== null);
      if (token.version !== null && before && before.version !== token.version) {
        text.append(
          h('span', {class: 'crossing', title: `from here on version ${token.version}`}, `v${token.version}`),
        );
      }
      const span = h(
        'span',
        {class: token.version === null ? 'token given' : 'token', 'data-index': tokens.length},
        token.text,
      );
      spans.push(span);
      tokens.push(token);
      text.append(span);
    });
    next += answer.texts.length;
    more.hidden = next >= answer.total;
    color(mode);
  }

  text.addEventListener('pointerover', (event) => {
    const index = event.target.dataset?.index;
    if (index !== undefined) point(Number(index));
  });
  text.addEventListener('keydown', (event) => {
    const step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10}[event.key];
    if (!step) return;
    event.preventDefault();
    point(Math.max(0, Math.min(spans.length - 1, at + step)));
    spans[at]?.scrollIntoView({block: 'nearest'});
  });
  await load();
  const modes = Object.entries(PAINTS).map(([name, [title]]) => [name, title]);
  return h(
    'div',
    {class: 'token-view'},
    h('div', {class: 'token-bar'}, choice('Color by', modes, mode, color), info),
    legend,
    text,
    more,
  );
}
