// The list of rollouts with its filters, for training and for evaluations.

import {choice, failure, foreign, h} from './dom.js';
import {number, percent, plural, versions} from './format.js';
import {ask, exportedFrom} from './source.js';

const PAGE = 50;
const PREVIEWED = 25;
/** Pixels from which on the list counts as being read. */
const SCROLLED = 300;
const ANY = [['', 'any']];
const YES_NO = [...ANY, ['true', 'yes'], ['false', 'no']];
const ORDERS = [
  ['newest', 'newest first'],
  ['best', 'highest reward first'],
  ['worst', 'lowest reward first'],
];
export const SOURCES = [
  ['training', 'training'],
  ['evaluation', 'evaluation'],
];
const TEXTS = [
  ['text', 'Text', 'in any turn'],
  ['problem', 'Problem', 'whole id'],
  ['group', 'Group', 'whole id'],
];
const RANGES = [
  ['step', 'Step', 1],
  ['version', 'Version', 1],
  ['reward', 'Reward', 'any'],
];

/** The ids and the beginning of the answers of rollouts, by `offset.place`. */
export async function previews(base, source, rows) {
  const found = new Map();
  for (let start = 0; start < rows.length; start += PREVIEWED) {
    const at = rows
      .slice(start, start + PREVIEWED)
      .map((row) => `${row.offset}.${row.place}`)
      .join(',');
    for (const each of await ask(`${base}/previews`, {source, at})) found.set(`${each.offset}.${each.place}`, each);
  }
  return found;
}

function input(filters, name, label, attributes, onChange) {
  return h(
    'label',
    {class: 'field'},
    h('span', {}, label),
    h('input', {
      ...attributes,
      name,
      value: filters[name] ?? '',
      on: {change: (event) => onChange(name, event.target.value.trim())},
    }),
  );
}

function range(filters, [name, label, step], onChange) {
  return h(
    'fieldset',
    {class: 'field range'},
    h('legend', {}, label),
    h(
      'div',
      {},
      ['from', 'to'].map((end) =>
        h('input', {
          type: 'number',
          step,
          placeholder: end,
          'aria-label': `${label} ${end}`,
          value: filters[`${name}_${end}`] ?? '',
          on: {change: (event) => onChange(`${name}_${end}`, event.target.value.trim())},
        }),
      ),
    ),
  );
}

function form(filters, run, onChange) {
  const isTraining = filters.source !== 'evaluation';
  const names = isTraining ? run.datasets : run.evaluation_datasets;
  const change = (name) => (value) => onChange(name, value);
  return h(
    'form',
    {class: 'filters panel', 'aria-label': 'Filters', on: {submit: (event) => event.preventDefault()}},
    choice('Rollouts of', SOURCES, filters.source, change('source')),
    choice('Order', ORDERS, filters.order, change('order')),
    RANGES.filter(([name]) => name !== 'step' || isTraining).map((each) => range(filters, each, onChange)),
    choice('Data set', [...ANY, ...names.map((name) => [name, name])], filters.dataset, change('dataset')),
    choice('Success', YES_NO, filters.success, change('success')),
    choice('Cut off', YES_NO, filters.cut, change('cut')),
    isTraining
      ? choice('Failed attempts', [...ANY, ['true', 'in its group']], filters.failed, change('failed'))
      : choice(
          'Failed',
          [...ANY, ['any', 'all that failed'], ...run.failures.map((name) => [name, name])],
          filters.failure || (filters.failed && 'any'),
          (value) => onChange(value === 'any' ? 'failed' : 'failure', value === 'any' ? 'true' : value),
        ),
    TEXTS.map(([name, label, placeholder]) => input(filters, name, label, {type: 'search', placeholder}, onChange)),
    h(
      'div',
      {class: 'field'},
      h('span', {}, '\u00a0'),
      h('button', {type: 'button', on: {click: () => onChange(null)}}, 'Clear'),
    ),
  );
}

function outcome(row) {
  if (row.failure) return h('span', {class: 'mark bad'}, foreign(row.failure));
  if (row.success === null) return h('span', {class: 'mark'}, 'no result');
  return h('span', {class: `mark ${row.success ? 'good' : 'bad'}`}, row.success ? 'success' : 'no success');
}

function line(context, source, row) {
  const said = h('span', {class: 'said'}, '…');
  const ids = h('span', {class: 'ids'});
  const link = context.link('rollout', {source, offset: row.offset, place: row.place});
  const element = h(
    'li',
    {},
    h(
      'a',
      {class: 'row', href: link},
      h('span', {class: 'reward', title: 'reward'}, number(row.reward, 3)),
      outcome(row),
      h(
        'span',
        {class: 'facts'},
        `${source === 'evaluation' ? 'due at ' : ''}${versions(row.first_version, row.last_version)}, ${plural(row.output_tokens, 'token')}`,
        row.is_cut ? h('span', {class: 'mark warn'}, 'cut off') : null,
        row.failed_attempts && source === 'training'
          ? h('span', {class: 'mark warn'}, `${row.failed_attempts} failed in its group`)
          : null,
      ),
      ids,
      said,
    ),
  );
  return {
    element,
    key: `${row.offset}.${row.place}`,
    show(found) {
      said.replaceChildren(foreign(found?.text || 'no text'));
      if (found) ids.replaceChildren(foreign(`${row.dataset} · ${found.problem_id}`));
    },
  };
}

/** The view; `context.parameters` are the filters. */
export async function rollouts(context) {
  const base = `/api/runs/${context.run}`;
  const filters = {source: 'training', order: 'newest', ...context.parameters};
  const list = h('ol', {class: 'rollouts', 'aria-label': 'Rollouts'});
  const count = h('p', {class: 'count', role: 'status'});
  const fresh = h('button', {type: 'button', hidden: true, on: {click: () => load(true)}}, 'Show new rollouts');
  const more = h('button', {type: 'button', hidden: true, on: {click: () => load(false)}}, 'Show more');
  let next = 0;
  let below = null;
  let pages = 0;
  let shownAt = '';

  function onChange(name, value) {
    const kept = name === null ? {source: filters.source} : {...filters, [name]: value};
    if (name === 'failure') delete kept.failed;
    if (name === 'failed' && value) delete kept.failure;
    if (name === 'source')
      ['dataset', 'failure', 'failed', 'step_from', 'step_to'].forEach((each) => delete kept[each]);
    context.go('rollouts', kept);
  }

  function tell(answer, total) {
    const looked =
      filters.text && answer.next !== null ? `, ${number(answer.looked_at)} of ${number(answer.total)} looked at` : '';
    const share = answer.indexed < 1 ? `; the index holds ${percent(answer.indexed)} of the run so far` : '';
    const of = filters.text ? '' : ` of ${number(answer.total)}`;
    count.textContent = `${number(total)}${of} rollouts${looked}${share}`;
  }

  async function load(isNew) {
    if (isNew) {
      [next, below, pages] = [0, null, 0];
      fresh.hidden = true;
    }
    more.disabled = true;
    try {
      const asked = exportedFrom ? {source: filters.source} : {...filters, skip: next, below, count: PAGE};
      const answer = await ask(`${base}/rollouts`, asked);
      const lines = answer.rows.map((row) => line(context, filters.source, row));
      if (isNew) list.replaceChildren();
      list.append(...lines.map((each) => each.element));
      pages += 1;
      [next, below] = [answer.next, answer.below];
      more.hidden = next === null;
      more.textContent = filters.text ? 'Search further' : 'Show more';
      tell(answer, list.children.length);
      const known = await previews(base, filters.source, answer.rows);
      lines.forEach((each) => each.show(known.get(each.key)));
    } catch (error) {
      count.replaceChildren(failure(error));
    }
    more.disabled = false;
  }

  const run = await ask(`${base}/overview`);
  const about = exportedFrom
    ? h(
        'div',
        {class: 'panel filters'},
        h('span', {}, exportedFrom.rule),
        choice('Rollouts of', SOURCES, filters.source, (value) => onChange('source', value)),
      )
    : form(filters, run, onChange);
  return {
    element: h('div', {class: 'view'}, h('h1', {class: 'hidden'}, 'Rollouts'), about, count, fresh, list, more),
    async refresh(pulse) {
      const now = `${pulse?.rollouts[filters.source]}/${pulse?.indexed[filters.source]}`;
      if (pages > 1 || (pages === 1 && (now === shownAt || filters.text))) return;
      shownAt = now;
      // Rows do not move under the pointer, nor while one of them has the focus.
      fresh.hidden = pages === 0 || !(list.matches(':hover, :focus-within') || window.scrollY > SCROLLED);
      if (fresh.hidden) await load(true);
    },
  };
}
