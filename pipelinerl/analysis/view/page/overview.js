// The view of a run as a whole: state, curves, processes, evaluations, fates.

import {LineChart} from './charts.js';
import {failure, foreign, h, panel, table} from './dom.js';
import {duration, number, percent, plural} from './format.js';
import {ask} from './source.js';

/** Charts by title: the name of the curve of each metric. A metric that ends in * stands for all that begin so. */
const CHARTS = {
  Success: {success: 'training'},
  Reward: {reward: 'training'},
  'Lag, in versions': {'finetune/lag_mean_versions': 'mean', 'finetune/lag_max_versions': 'largest'},
  'Effective sample size': {'finetune/ess': 'before clamping', 'finetune/ess_after_clamp': 'after clamping'},
  'Entropy, in nats': {'rl/entropy': 'exact', 'rl/entropy_estimate': 'estimate'},
  KL: {'finetune/kl_sampler_trainer': 'sampler to trainer', 'rl/kl_reference': 'to reference'},
  'Cut off, share of rollouts': {'preprocessor/cut_fraction': 'training'},
  'Output tokens per rollout': {'actor/output_tokens_per_rollout': 'training'},
  'Gradient norm': {'finetune/grad_norm': 'before clipping'},
  'Sampling, tokens/s': {'actor/output_tokens_per_s': 'all servers'},
  'Training, samples/s': {'finetune/samples_per_s': 'trainer'},
  'Trainer waits, seconds per step': {
    'finetune/wait_data_s': 'for samples',
    'finetune/weight_update_s': 'for weight updates',
    'finetune/switch_s': 'for switching',
  },
  'Servers idle, seconds since the last report': {'actor/server_idle_s_*': 'server '},
};
/** How long the tables of processes and fates may stay unchanged while no step ends. */
const QUIET_MS = 3000;
/** What evaluations add to a chart, by its title. */
const EVALUATED = {
  Success: 'success_rate',
  Reward: 'mean_reward',
  'Output tokens per rollout': 'output_tokens',
  'Cut off, share of rollouts': 'cut_fraction',
};

function metricsOf(available) {
  return Object.entries(CHARTS).map(([title, curves]) => [
    title,
    Object.entries(curves).flatMap(([metric, name]) =>
      metric.endsWith('*')
        ? available
            .filter((each) => each.startsWith(metric.slice(0, -1)))
            .map((each) => [each, name + each.slice(metric.length - 1)])
        : [[metric, name]],
    ),
  ]);
}

function evaluationCurves(title, evaluations) {
  const field = EVALUATED[title];
  const found = new Map();
  for (const each of field ? evaluations : []) {
    if (each[field] === null || each[field] === undefined) continue;
    const name = `held out: ${each.dataset_name}`;
    const curve = found.get(name) ?? {name, x: [], y: [], isPoints: true};
    curve.x.push(each.due_version);
    curve.y.push(each[field]);
    found.set(name, curve);
  }
  return [...found.values()];
}

function card(name, value, more = '') {
  return h(
    'div',
    {class: 'card'},
    h('div', {class: 'name'}, name),
    h('div', {class: 'value'}, value),
    h('div', {class: 'more'}, more),
  );
}

function cards(run) {
  const step = run.max_steps ? `${number(run.step)} / ${number(run.max_steps)}` : number(run.step);
  const eta = run.eta_s === null ? '' : `${duration(run.eta_s)} left`;
  const age = run.step_age_s === null || run.state !== 'running' ? '' : `last step ${duration(run.step_age_s)} ago`;
  const measured = run.evaluations.filter((each) => each.success_rate !== null);
  const last = run.success_after ?? measured.at(-1)?.success_rate;
  return h(
    'div',
    {class: 'cards'},
    card(
      'State',
      h('span', {class: `state ${run.state}`}, run.state),
      run.reason ? foreign(run.reason) : plural(run.starts, 'start'),
    ),
    card('Step', step, [eta, age].filter(Boolean).join(', ') || `${duration(run.training_s)} of training`),
    card(
      'Held-out success',
      percent(last),
      run.success_before === null ? 'no evaluation yet' : `${percent(run.success_before)} before training`,
    ),
    card(
      'Weight updates',
      number(run.weight_updates),
      run.training_s ? `servers paused ${percent(run.stall_s / run.training_s)} of the time` : '',
    ),
    card('Goodput', percent(run.goodput), 'of sampled tokens were trained'),
    card(
      'Lag',
      number(run.latest['finetune/lag_mean_versions'], 3),
      `versions on average, at most ${number(run.latest['finetune/lag_max_versions'])}`,
    ),
  );
}

function doing(job) {
  if (job.pid === null) return 'never started';
  const silence = job.heartbeat_age_s ?? 0;
  if (!job.is_alive) return `ended, last sign of life ${duration(silence)} ago`;
  const silent = silence > 10 ? `; no sign of life for ${duration(silence)}` : '';
  if (job.waiting_s === null) return `working${silent}`;
  const limit = job.deadline_s === null ? '' : ` (at most ${duration(job.deadline_s)})`;
  return `waiting for ${job.waiting_for} for ${duration(job.waiting_s)}${limit}${silent}`;
}

function processes(run) {
  return table(
    'Processes',
    ['Process', '#Pid', '#Heartbeat', '#Progress', 'State'],
    run.jobs.map((job) => [
      foreign(job.name),
      job.pid === null ? '–' : String(job.pid),
      job.heartbeat_age_s === null ? '–' : `${duration(job.heartbeat_age_s)} ago`,
      number(job.progress),
      h('span', {class: job.is_alive ? 'alive' : 'quiet'}, foreign(doing(job))),
    ]),
  );
}

function evaluations(run) {
  return table(
    'Evaluations',
    ['Data set', '#Version', '#Success', '#Reward', '#Rollouts', '#Failed', 'Estimates'],
    run.evaluations
      .slice(-100)
      .reverse()
      .map((each) => [
        foreign(each.dataset_name),
        `${each.due_version}${each.is_final ? ' (final)' : ''}`,
        percent(each.success_rate),
        number(each.mean_reward),
        number(each.num_rollouts),
        number(each.num_failed),
        Object.entries(each.estimates)
          .map(
            ([name, found]) =>
              `${name.replace('_at_', '@')} ${percent(found.value)} (${percent(found.low)} to ${percent(found.high)})`,
          )
          .join(', ') || '–',
      ]),
  );
}

function fates(run) {
  const total = Object.values(run.fates).reduce((sum, count) => sum + count, 0);
  const names = Object.entries(run.fates).sort((a, b) => b[1] - a[1]);
  const rows = names.map(([fate, count]) => {
    const bar = h('span', {class: 'bar'});
    bar.style.width = `${Math.max(1, (100 * count) / total)}%`;
    const reasons = run.reasons
      .filter((each) => each.fate === fate)
      .map((each) => `${each.reason} ${number(each.count)}`)
      .join(', ');
    return [
      fate,
      number(count),
      percent(count / total),
      number(run.fate_tokens[fate] ?? 0),
      h('span', {class: 'track'}, bar),
      foreign(reasons || '–'),
    ];
  });
  const columns = ['Fate', '#Samples', '#Share', '#Tokens', '', 'Reasons'];
  return rows.length ? table('Fates', columns, rows) : h('p', {class: 'quiet'}, 'No sample has a fate yet.');
}

function findings(run) {
  const columns = ['Finding', '#Up to step', 'Evidence', 'What to do'];
  const cells = ({name, step, evidence, advice}) => [name, number(step), foreign(evidence), foreign(advice)];
  const rows = run.findings.map(cells);
  return rows.length ? panel('Findings', {}, table('Findings', columns, rows)) : null;
}

/** The view; returns {element, refresh}. */
export async function overview(context) {
  const base = `/api/runs/${context.run}`;
  const top = h('div', {});
  const bottom = h('div', {});
  const grid = h('div', {class: 'charts'});
  const charts = new Map();
  for (const title of Object.keys(CHARTS)) {
    const chart = new LineChart(title);
    charts.set(title, chart);
    grid.append(h('figure', {class: 'panel'}, h('figcaption', {}, title), chart.element));
  }
  let drawnAt = null;
  let seen = {step: null, at: 0};

  async function refresh(pulse) {
    if (pulse && pulse.step === seen.step && Date.now() < seen.at + QUIET_MS) return;
    seen = {step: pulse?.step, at: Date.now()};
    const run = await ask(`${base}/overview`);
    top.replaceChildren(
      ...run.faults.map(({stream, fault}) => failure(new Error(`${stream}: ${fault}`))),
      cards(run),
      findings(run) ?? '',
    );
    if (!bottom.matches(':focus-within')) {
      bottom.replaceChildren(
        panel('Processes', {}, processes(run)),
        panel(
          'Evaluations',
          {},
          run.evaluations.length ? evaluations(run) : h('p', {class: 'quiet'}, 'No evaluation has ended yet.'),
        ),
        panel('Fates of samples', {}, fates(run)),
      );
    }
    const now = `${run.step}/${run.evaluations.length}/${run.version}`;
    if (now === drawnAt) return;
    drawnAt = now;
    const wanted = metricsOf(await ask(`${base}/metrics`));
    const names = wanted.flatMap(([, curves]) => curves.map(([metric]) => metric)).join(',');
    const found = await ask(`${base}/curves`, {names});
    for (const [title, curves] of wanted) {
      const known = curves.filter(([metric]) => found.series[metric]?.some((value) => value !== null));
      const shown = [
        ...known.map(([metric, name]) => ({name, x: found.steps, y: found.series[metric]})),
        ...evaluationCurves(title, run.evaluations),
      ];
      charts.get(title).element.parentElement.hidden = !shown.length;
      charts.get(title).set(shown);
    }
  }

  return {
    element: h('div', {class: 'view'}, h('h1', {class: 'hidden'}, 'Overview'), top, grid, bottom),
    refresh,
    isAlwaysLive: true,
  };
}
