// Curves of several runs over each other.

import {LineChart} from './charts.js';
import {choice, foreign, h, panel, table} from './dom.js';
import {duration, number, percent} from './format.js';
import {ask} from './source.js';

const AXES = [
  ['steps', 'optimizer step'],
  ['hours', 'hours of training'],
  ['samples', 'trained samples'],
];
/** Made of the evaluations of a run, not a metric that it recorded. */
const HELD_OUT = 'success, held out';
const FIRST = ['success', HELD_OUT, 'reward'];
const MORE = [
  'finetune/ess',
  'rl/entropy_estimate',
  'finetune/kl_sampler_trainer',
  'actor/output_tokens_per_rollout',
  'finetune/lag_mean_versions',
  'finetune/samples_per_s',
];

function titled(context, index) {
  const {name} = context.runs[index];
  return context.runs.filter((run) => run.name === name).length > 1 ? context.runs[index].folder : name;
}

/** Values of `axis` (of the steps of `curves`) at versions: of the last step up to each, 0 before the first. */
function along(curves, axis, versions) {
  return versions.map((version) => {
    const at = curves.steps.findLastIndex((step) => step <= version);
    return axis === 'steps' ? version : at < 0 ? 0 : curves[axis][at];
  });
}

/** The success rates of a run's evaluations, a curve for each data set. */
function heldOut(name, run, curves, axis) {
  const measured = run.evaluations.filter((each) => each.success_rate !== null);
  const datasets = [...new Set(measured.map((each) => each.dataset_name))];
  return datasets.map((dataset) => {
    const own = measured.filter((each) => each.dataset_name === dataset);
    const x = along(
      curves,
      axis,
      own.map((each) => each.due_version),
    );
    return {name: datasets.length > 1 ? `${name}: ${dataset}` : name, x, y: own.map((each) => each.success_rate)};
  });
}

/** The view; `context.parameters`: metric, x. */
export async function compare(context) {
  const {x = 'steps', metric = 'success'} = context.parameters;
  const indices = context.runs.map((_, index) => index);
  const names = new Set();
  for (const index of indices) (await ask(`/api/runs/${index}/metrics`)).forEach((name) => names.add(name));
  names.add(HELD_OUT);
  const shown = [...new Set([metric, ...FIRST, ...MORE])].filter((name) => names.has(name));
  const charts = shown.map((name, index) => [name, new LineChart(name, {height: index ? 190 : 320})]);
  const body = h('div', {});

  async function refresh() {
    const runs = await Promise.all(indices.map((index) => ask(`/api/runs/${index}/overview`)));
    const wanted = shown.filter((name) => name !== HELD_OUT).join(',');
    const found = await Promise.all(indices.map((index) => ask(`/api/runs/${index}/curves`, {names: wanted})));
    const curvesOf = (name, index) =>
      name === HELD_OUT
        ? heldOut(titled(context, index), runs[index], found[index], x)
        : [{name: titled(context, index), x: found[index][x], y: found[index].series[name] ?? []}];
    for (const [name, chart] of charts) {
      const curves = indices.flatMap((index) => curvesOf(name, index));
      const known = curves.filter((curve) => curve.y.some((value) => value !== null));
      chart.set(known, AXES.find(([key]) => key === x)[1]);
    }
    const columns = ['Run', 'State', '#Steps', '#Success before', '#Success after', '#Training', '#Goodput', 'Model'];
    const lines = runs.map((run, index) => [
      foreign(titled(context, index)),
      run.state,
      number(run.step),
      percent(run.success_before),
      percent(run.success_after),
      duration(run.training_s),
      percent(run.goodput),
      foreign(run.model),
    ]);
    body.replaceChildren(table('Runs', columns, lines));
  }

  const go = (name) => (value) => context.go('compare', {x, metric, [name]: value});
  const [first, ...rest] = charts.map(([name, chart]) =>
    h('figure', {class: 'panel'}, h('figcaption', {}, foreign(name)), chart.element),
  );
  return {
    element: h(
      'div',
      {class: 'view'},
      h('h1', {class: 'hidden'}, 'Compare runs'),
      h(
        'div',
        {class: 'filters panel'},
        choice(
          'Metric',
          [...names].map((name) => [name, name]),
          metric,
          go('metric'),
        ),
        choice('Over', AXES, x, go('x')),
      ),
      first ?? h('p', {class: 'quiet'}, 'No metric has been recorded yet.'),
      h('div', {class: 'charts'}, rest),
      panel('Runs', {}, body),
    ),
    refresh,
  };
}
