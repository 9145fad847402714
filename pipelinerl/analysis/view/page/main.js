// The frame: header, addresses of views, the theme, and the pulse that keeps the page live.

import {redrawCharts} from './charts.js';
import {choice, failure, foreign, h} from './dom.js';
import {compare} from './compare.js';
import {number, percent} from './format.js';
import {overview} from './overview.js';
import {problem} from './problem.js';
import {rollout} from './rollout.js';
import {rollouts} from './rollouts.js';
import {ask, exportedFrom} from './source.js';

const VIEWS = {overview, rollouts, rollout, problem, compare};
const TABS = [
  ['overview', 'Overview'],
  ['rollouts', 'Rollouts'],
  ['problem', 'Problem'],
  ['compare', 'Compare'],
];
const THEMES = [
  ['', 'system'],
  ['light', 'light'],
  ['dark', 'dark'],
];
const PULSE_MS = 1000;
const THEME_KEY = 'pipelinerl-theme';

const page = {runs: [], view: null, changes: null, opened: 0, tabs: [], runChoice: null};

function addressOf(view, run, parameters) {
  const known = Object.entries({...parameters, run: run || null}).filter(
    ([, value]) => value !== null && value !== undefined && value !== '',
  );
  return `#/${view}?${new URLSearchParams(known)}`;
}

function present() {
  const [name, query = ''] = location.hash.replace(/^#\/?/, '').split('?');
  const {run = '0', ...parameters} = Object.fromEntries(new URLSearchParams(query));
  return {name: name in VIEWS ? name : 'overview', run: Math.min(Number(run) || 0, page.runs.length - 1), parameters};
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  try {
    localStorage.setItem(THEME_KEY, theme);
  } catch {
    /* a file that was opened from disk may have no storage */
  }
  redrawCharts();
}

function savedTheme() {
  try {
    return localStorage.getItem(THEME_KEY) ?? '';
  } catch {
    return '';
  }
}

/** The header is made once, so that whoever works with the keyboard stays where they are. */
function makeHeader() {
  const {runs} = page;
  const chooseRun = (value) => {
    const {name} = present();
    location.hash = addressOf(name === 'rollout' ? 'rollouts' : name, Number(value));
  };
  const names = runs.map((each, index) => [index, each.name]);
  page.tabs = TABS.map(([key, title]) => [key, h('a', {}, title)]);
  page.runChoice =
    runs.length > 1 ? choice('Run', names, 0, chooseRun) : h('span', {class: 'run-name'}, foreign(runs[0].name));
  document.getElementById('header').replaceChildren(
    h('a', {class: 'brand', href: '#/overview'}, 'pipelinerl'),
    page.runChoice,
    h(
      'nav',
      {'aria-label': 'Views'},
      page.tabs.map(([, link]) => link),
    ),
    h('span', {id: 'pulse', class: 'pulse', role: 'status'}, exportedFrom ? `exported ${exportedFrom.made}` : ''),
    choice('Theme', THEMES, savedTheme(), setTheme),
  );
}

function showWhere({name, run}) {
  const select = page.runChoice.querySelector('select');
  if (select) select.value = String(run);
  for (const [key, link] of page.tabs) {
    link.href = addressOf(key, run);
    if (key === name || (name === 'rollout' && key === 'rollouts')) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
  }
}

async function open() {
  const where = present();
  const opened = ++page.opened;
  const main = document.getElementById('main');
  showWhere(where);
  document.title = `${page.runs[where.run].name}: ${where.name} – pipelinerl`;
  const context = {
    run: where.run,
    runs: page.runs,
    parameters: where.parameters,
    link: (view, parameters) => addressOf(view, where.run, parameters),
    go: (view, parameters) => {
      location.hash = addressOf(view, where.run, parameters);
    },
  };
  try {
    const view = await VIEWS[where.name](context);
    if (opened !== page.opened) return;
    main.replaceChildren(view.element);
    page.view = view;
    page.changes = null;
    const found = await pulse();
    await view.refresh?.(found);
  } catch (error) {
    if (opened === page.opened) main.replaceChildren(failure(error));
  }
}

async function pulse() {
  if (exportedFrom) return null;
  const {run} = present();
  const found = await ask(`/api/runs/${run}/pulse`);
  const indexed = found.indexed.training < 1 ? `, index ${percent(found.indexed.training)}` : '';
  document
    .getElementById('pulse')
    .replaceChildren(h('span', {class: `state ${found.state}`}, found.state), ` step ${number(found.step)}${indexed}`);
  return found;
}

async function keepLive() {
  if (!document.hidden) {
    try {
      const {view} = page;
      const found = await pulse();
      const isNew = found.changes !== page.changes || (view?.isAlwaysLive && found.state === 'running');
      page.changes = found.changes;
      if (isNew && view === page.view) await view?.refresh?.(found);
    } catch (error) {
      document.getElementById('pulse').replaceChildren(foreign(error.message));
    }
  }
  setTimeout(keepLive, PULSE_MS);
}

async function begin() {
  setTheme(savedTheme());
  try {
    page.runs = await ask('/api/runs');
  } catch (error) {
    document.getElementById('main').replaceChildren(failure(error));
    return;
  }
  makeHeader();
  window.addEventListener('hashchange', open);
  window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redrawCharts);
  await open();
  if (!exportedFrom) setTimeout(keepLive, PULSE_MS);
}

begin();
