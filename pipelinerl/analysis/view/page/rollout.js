// One group: its attempts side by side, and one of them in full, as a conversation or token by token.

import {failure, foreign, h, panel, table} from './dom.js';
import {duration, number, plural, versions} from './format.js';
import {ask} from './source.js';
import {tokenView} from './tokens.js';

/** Where a chat template begins a message, by the markers of common templates. */
const MESSAGE =
  /<\|im_start\|>(\w+)\n?|<\|start_header_id\|>(\w+)<\|end_header_id\|>\n*|<\|(system|user|assistant|tool|observation|developer)\|>\n?|<start_of_turn>(\w+)\n?/g;
const TOOL = /(<tool_call>[\s\S]*?<\/tool_call>|<tool_response>[\s\S]*?<\/tool_response>)/;

/** The messages of a text: [{role, text}]. What stands before the first marker has the role `first`. */
export function messagesOf(text, first) {
  const messages = [];
  let role = first;
  let from = 0;
  for (const match of text.matchAll(MESSAGE)) {
    if (match.index > from) messages.push({role, text: text.slice(from, match.index)});
    role = match.slice(1).find(Boolean);
    from = match.index + match[0].length;
  }
  if (from < text.length) messages.push({role, text: text.slice(from)});
  return messages;
}

function words(text) {
  return text
    .split(TOOL)
    .map((part) => (TOOL.test(part) ? h('span', {class: 'tool'}, foreign(part)) : part ? foreign(part) : null));
}

function bubbles(turn, last) {
  if (turn.text === null) return [h('p', {class: 'quiet'}, `${plural(turn.num_tokens, 'token')} without text`)];
  const isOwn = turn.kind === 'generated';
  const by = {
    prompt: 'given',
    context: 'given, not trained',
    generated: `generated, ${versions(turn.first_version, turn.last_version)}`,
  }[turn.kind];
  // What the model generated stays one message: it may hold markers that it made up.
  const messages = isOwn ? [{role: 'assistant', text: turn.text}] : messagesOf(turn.text, last);
  return messages.map(({role, text}, index) =>
    h(
      'div',
      {class: `message ${isOwn ? 'own' : ''} ${role}`},
      h(
        'div',
        {class: 'role'},
        role,
        index ? null : h('span', {class: 'quiet'}, `${by}, ${plural(turn.num_tokens, 'token')}`),
      ),
      h('div', {class: 'text'}, words(text)),
    ),
  );
}

function conversation(sample, showAll) {
  if (sample.tokens_removed)
    return h('p', {class: 'quiet'}, 'The tokens of this sample were removed (streams.retention=heads).');
  const cut = sample.turns.some((turn) => turn.cut_chars);
  return h(
    'div',
    {class: 'conversation'},
    sample.turns.map((turn) => bubbles(turn, turn.kind === 'prompt' ? 'prompt' : 'context')),
    cut ? h('button', {type: 'button', on: {click: showAll}}, 'Show the cut parts too') : null,
  );
}

function factsOf(sample) {
  const facts = [
    `reward ${number(sample.reward)}`,
    sample.advantage === null ? null : `advantage ${number(sample.advantage)}`,
    versions(sample.first_version, sample.last_version),
    `${number(sample.prompt_tokens)} prompt + ${number(sample.output_tokens)} output tokens`,
    sample.fate,
    `finish reason ${sample.finish_reason}`,
    sample.finished ? null : 'cut off',
    sample.masked_tokens ? `${number(sample.masked_tokens)} tokens masked` : null,
  ];
  return facts.filter(Boolean).join(', ');
}

function advantageOf(rollout) {
  const known = rollout.samples.map((sample) => sample.advantage).filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

function lastWords(rollout) {
  const turn = rollout.samples.at(-1)?.turns.findLast((each) => each.kind === 'generated');
  return turn?.text ?? rollout.message ?? '';
}

function attempt(context, group, rollout, place, isChosen) {
  const advantage = advantageOf(rollout);
  const sign = advantage === null || advantage === 0 ? '' : advantage > 0 ? 'above' : 'below';
  const tokens = rollout.samples.reduce((sum, sample) => sum + sample.output_tokens, 0);
  const outcome =
    rollout.failure || (rollout.success === null ? 'no result' : rollout.success ? 'success' : 'no success');
  return h(
    'a',
    {
      class: `attempt ${sign}`,
      href: context.link('rollout', {source: group.source, offset: group.offset, place}),
      'aria-current': isChosen ? 'true' : null,
    },
    h(
      'div',
      {class: 'attempt-top'},
      h('strong', {}, number(rollout.rollout_reward, 3)),
      h('span', {class: `mark ${rollout.success ? 'good' : 'bad'}`}, foreign(outcome)),
    ),
    group.source === 'evaluation'
      ? null
      : h('div', {class: 'quiet'}, advantage === null ? 'no advantage yet' : `advantage ${number(advantage, 3)}`),
    h('div', {class: 'quiet'}, `${plural(rollout.samples.length, 'sample')}, ${plural(tokens, 'token')}`),
    h('div', {class: 'last-words'}, foreign(lastWords(rollout).slice(-300))),
  );
}

function numbers(rollout) {
  const own = Object.entries(rollout.metrics).map(([name, value]) => [foreign(name), number(value)]);
  return own.length
    ? h(
        'details',
        {},
        h('summary', {}, 'Metrics of the rollout'),
        table('Metrics', ['Name', '#Value'], own),
      )
    : null;
}

function sampleView(base, group, place, sample, index, showAll) {
  const body = h('div', {}, conversation(sample, showAll));
  const buttons = ['Conversation', 'Tokens'].map((name) =>
    h('button', {type: 'button', 'aria-pressed': String(name === 'Conversation'), on: {click: () => show(name)}}, name),
  );
  async function show(name) {
    buttons.forEach((button) => button.setAttribute('aria-pressed', String(button.textContent === name)));
    try {
      body.replaceChildren(
        name === 'Tokens'
          ? await tokenView(base, {source: group.source, offset: group.offset, place, sample: index})
          : conversation(sample, showAll),
      );
    } catch (error) {
      body.replaceChildren(failure(error));
    }
  }
  const canShowTokens = !sample.tokens_removed && sample.turns.some((turn) => turn.num_tokens);
  const metadata = Object.keys(sample.metadata).length
    ? h('details', {}, h('summary', {}, 'Metadata'), h('pre', {}, foreign(JSON.stringify(sample.metadata, null, 1))))
    : null;
  return panel(
    `Sample ${sample.sample_id}`,
    {},
    h('p', {class: 'quiet'}, foreign(factsOf(sample))),
    canShowTokens ? h('div', {class: 'switch', role: 'group', 'aria-label': 'Form'}, buttons) : null,
    body,
    metadata,
  );
}

/** The view; `context.parameters`: source, offset, place. */
export async function rollout(context) {
  const base = `/api/runs/${context.run}`;
  const {source = 'training', offset, place: wanted = '0'} = context.parameters;
  const place = Number(wanted);
  const element = h('div', {class: 'view'});

  async function draw(whole) {
    const group = await ask(`${base}/group`, {source, offset, whole: whole || null});
    const chosen = group.rollouts[place] ?? group.rollouts[0];
    if (!chosen) throw new Error('This group has no rollouts.');
    const isEvaluation = source === 'evaluation';
    const kind = isEvaluation
      ? `evaluation due at version ${chosen.due_version}`
      : group.step === null
        ? 'not trained yet'
        : `trained in step ${group.step}`;
    const where = group.no_text ? h('p', {class: 'failure'}, foreign(group.no_text)) : null;
    const whose = isEvaluation
      ? [
          chosen.failure ? h('p', {class: 'failure'}, foreign(`${chosen.failure}: ${chosen.message}`)) : null,
          chosen.has_result
            ? null
            : h(
                'p',
                {class: 'quiet'},
                'This evaluation has no result: it still runs, was cut off, or failed as a whole.',
              ),
          h('details', {}, h('summary', {}, 'Problem'), h('pre', {}, foreign(chosen.problem))),
        ]
      : null;
    element.replaceChildren(
      h('h1', {}, isEvaluation ? 'Rollout ' : 'Group ', foreign(isEvaluation ? chosen.rollout_id : group.group_id)),
      h(
        'p',
        {class: 'quiet'},
        foreign(group.dataset),
        ', problem ',
        h('a', {href: context.link('problem', {problem: group.problem_id, source})}, foreign(group.problem_id)),
        `, ${kind}`,
        group.failed_rollouts ? `, ${plural(group.failed_rollouts, 'failed attempt')}` : '',
        chosen.latency_s === null ? '' : `, ${duration(chosen.latency_s)}`,
      ),
      where ?? '',
      ...(whose ?? []).filter(Boolean),
      h(
        'nav',
        {class: 'attempts', 'aria-label': 'Attempts of the group'},
        group.rollouts.map((each, index) => attempt(context, group, each, index, each === chosen)),
      ),
      numbers(chosen) ?? '',
      ...chosen.samples.map((sample, index) => sampleView(base, group, place, sample, index, () => draw(true))),
      chosen.samples.length ? '' : h('p', {class: 'quiet'}, 'Nothing of this rollout is recorded as a sample.'),
    );
  }

  await draw(false);
  return {element};
}
