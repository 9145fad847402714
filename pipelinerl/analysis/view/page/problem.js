// One problem over training: the rewards of its attempts by version, and what was answered.

import {LineChart} from './charts.js';
import {choice, foreign, h, panel, table} from './dom.js';
import {number, percent, versions} from './format.js';
import {previews} from './rollouts.js';
import {ask} from './source.js';

const MOST = 1000;
const SHOWN = 50;

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

/** The view; `context.parameters`: problem, source. */
export async function problem(context) {
  const base = `/api/runs/${context.run}`;
  const {problem: name = '', source = 'training'} = context.parameters;
  const field = h('input', {type: 'search', value: name, placeholder: 'id of a problem', 'aria-label': 'Problem'});
  const form = h(
    'form',
    {
      class: 'filters panel',
      on: {
        submit: (event) => {
          event.preventDefault();
          context.go('problem', {problem: field.value.trim(), source});
        },
      },
    },
    choice(
      'Rollouts of',
      [
        ['training', 'training'],
        ['evaluation', 'evaluation'],
      ],
      source,
      (value) => context.go('problem', {problem: name, source: value}),
    ),
    h('label', {class: 'field wide'}, h('span', {}, 'Problem'), field),
    h('div', {class: 'field'}, h('span', {}, '\u00a0'), h('button', {type: 'submit'}, 'Show')),
  );
  const heading = h('h1', {class: name ? '' : 'hidden'}, 'Problem ', foreign(name));
  if (!name)
    return {
      element: h(
        'div',
        {class: 'view'},
        heading,
        form,
        h(
          'p',
          {class: 'quiet'},
          'Enter an id, or open a rollout and follow the link of its problem. Evaluations attempt the same problems every time.',
        ),
      ),
    };
  const {rows, total} = await ask(`${base}/rollouts`, {source, problem: name, count: MOST});
  const curve = byVersion(rows);
  const chart = new LineChart(`Reward and success of problem ${name}`, {height: 240, xLabel: 'version'});
  chart.set([
    {name: 'mean reward', x: curve.map((each) => each.version), y: curve.map((each) => each.reward)},
    {name: 'success', x: curve.map((each) => each.version), y: curve.map((each) => each.success)},
  ]);
  const known = await previews(base, source, rows.slice(0, SHOWN));
  const columns = [
    {name: 'Version', number: true},
    {name: 'Reward', number: true},
    {name: 'Success'},
    {name: 'Tokens', number: true},
    {name: 'What the model said last'},
  ];
  const lines = rows
    .slice(0, SHOWN)
    .map((row) => [
      h(
        'a',
        {href: context.link('rollout', {source, offset: row.offset, place: row.place})},
        versions(row.first_version, row.last_version).replace(/versions? /, ''),
      ),
      number(row.reward, 3),
      row.success === null ? '–' : row.success ? 'yes' : 'no',
      number(row.output_tokens),
      foreign(known.get(`${row.offset}.${row.place}`)?.text ?? ''),
    ]);
  const success = rows.filter((row) => row.success).length / (rows.length || 1);
  return {
    element: h(
      'div',
      {class: 'view'},
      heading,
      form,
      h('p', {class: 'count'}, `${number(total)} rollouts, ${percent(success)} of them with success`),
      h('figure', {class: 'panel'}, h('figcaption', {}, 'Reward and success by version'), chart.element),
      panel('Newest attempts', {}, table('Attempts', columns, lines)),
    ),
  };
}
