// One problem over training: the rewards of its attempts by version, and what was answered.

import {LineChart} from './charts.js';
import {choice, foreign, h, panel, table} from './dom.js';
import {number, percent, plural, versions} from './format.js';
import {previews, SOURCES} from './rollouts.js';
import {ask, exportedFrom} from './source.js';

const MOST = 1000;
const SHOWN = 50;
const HELP =
  'Enter an id, or open a rollout and follow the link of its problem. Evaluations attempt the same problems every time.';

function byVersion(rows) {
  const found = new Map();
  for (const row of rows) {
    if (row.reward === null) continue;
    const own = found.get(row.last_version) ?? [];
    own.push(row);
    found.set(row.last_version, own);
  }
  return [...found]
    .sort(([a], [b]) => a - b)
    .map(([version, own]) => ({
      version,
      reward: own.reduce((sum, row) => sum + row.reward, 0) / own.length,
      success: own.filter((row) => row.success).length / own.length,
    }));
}

/** The newest attempts at a problem, with what is known of them; an exported file has some of all problems together. */
async function attemptsOf(base, source, name) {
  const {rows, total} = await ask(`${base}/rollouts`, {source, problem: name, count: MOST});
  const known = await previews(base, source, exportedFrom ? rows : rows.slice(0, SHOWN));
  const textOf = (row) => known.get(`${row.offset}.${row.place}`);
  if (!exportedFrom) return {rows, total, textOf};
  const own = rows.filter((row) => textOf(row)?.problem_id === name);
  return {rows: own, total: own.length, textOf};
}

function attemptsTable(context, source, rows, textOf) {
  const columns = ['#Version', '#Reward', 'Success', '#Tokens', 'What the model said last'];
  const link = (row) => context.link('rollout', {source, offset: row.offset, place: row.place});
  const lines = rows.map((row) => [
    h('a', {href: link(row)}, versions(row.first_version, row.last_version).replace(/versions? /, '')),
    number(row.reward, 3),
    row.success === null ? '–' : row.success ? 'yes' : 'no',
    number(row.output_tokens),
    foreign(textOf(row)?.text ?? ''),
  ]);
  return table('Attempts', columns, lines);
}

function problemForm(context, name, source) {
  const field = h('input', {type: 'search', value: name, placeholder: 'id of a problem', 'aria-label': 'Problem'});
  const submit = (event) => {
    event.preventDefault();
    context.go('problem', {problem: field.value.trim(), source});
  };
  return h(
    'form',
    {class: 'filters panel', on: {submit}},
    choice('Rollouts of', SOURCES, source, (value) => context.go('problem', {problem: name, source: value})),
    h('label', {class: 'field wide'}, h('span', {}, 'Problem'), field),
    h('div', {class: 'field'}, h('span', {}, '\u00a0'), h('button', {type: 'submit'}, 'Show')),
  );
}

/** The view; `context.parameters`: problem, source. */
export async function problem(context) {
  const base = `/api/runs/${context.run}`;
  const {problem: name = '', source = 'training'} = context.parameters;
  const heading = h('h1', {class: name ? '' : 'hidden'}, 'Problem ', foreign(name));
  const element = h('div', {class: 'view'}, heading, problemForm(context, name, source));
  if (!name) {
    element.append(h('p', {class: 'quiet'}, HELP));
    return {element};
  }
  const {rows, total, textOf} = await attemptsOf(base, source, name);
  const curve = byVersion(rows);
  const x = curve.map((each) => each.version);
  const chart = new LineChart(`Reward and success of problem ${name}`, {height: 240, xLabel: 'version'});
  chart.set([
    {name: 'mean reward', x, y: curve.map((each) => each.reward)},
    {name: 'success', x, y: curve.map((each) => each.success)},
  ]);
  const success = rows.filter((row) => row.success).length / (rows.length || 1);
  element.append(
    h('p', {class: 'count'}, `${plural(total, 'rollout')}, ${percent(success)} of them with success`),
    h('figure', {class: 'panel'}, h('figcaption', {}, 'Reward and success by version'), chart.element),
    panel('Newest attempts', {}, attemptsTable(context, source, rows.slice(0, SHOWN), textOf)),
  );
  return {element};
}
