import { writeFileSync } from 'node:fs';
import { COMMANDS, EVENTS, JOB_STATES, type JobCommand, type JobEvent, type JobState } from '@leasehold/nestjs';
import { readPage } from '../support/page-examples';

// docs/guide/states.md prints the tables of transitions.ts. `WRITE_DOCS=1 npx jest dist/test/guide/states.spec.js` writes it anew.

const EFFECTS: Record<string, string> = {
  requested: '*asked to stop*',
  withdrawn: '*the pause is withdrawn*',
  unchanged: '*nothing to do*',
  revoked: 'cancelled, at once',
  reprioritised: '*another priority*',
  resumed: 'ready, scheduled or blocked',
  hurried: 'ready, first in line',
  retried: 'ready, fresh budgets',
  deleted: 'gone',
};

const TEXT: Record<JobEvent, string> = {
  promote: 'its time has come',
  unblock: 'its key or a place is free',
  claim: 'a worker takes it',
  complete: 'the handler returned',
  fail: 'the handler threw',
  fatal: 'NonRetryableError, or a result that cannot be stored',
  snooze: 'lease.snooze',
  stopped: 'it ended on a request to stop that is gone by now',
  release: 'its process shut down',
  return: 'its process lost trust in its lease',
  giveback: 'it was claimed and never started',
  crash: 'its worker was lost',
  lostdrain: 'its worker was lost while shutting down',
  deadline: 'the deadline passed',
  revoke: 'forceCancel',
};

const commandTable = (): string =>
  [
    `| | ${JOB_STATES.join(' | ')} |`,
    `| --- |${' --- |'.repeat(JOB_STATES.length)}`,
    ...(Object.keys(COMMANDS) as JobCommand[]).map((command) => {
      const cells = JOB_STATES.map((state) => {
        const effect = COMMANDS[command][state];
        return effect === undefined ? '—' : (EFFECTS[effect] ?? effect);
      });
      return `| \`${command}\` | ${cells.join(' | ')} |`;
    }),
  ].join('\n');

const eventTable = (): string =>
  [
    '| event | | from | to | attempt | budget |',
    '| --- | --- | --- | --- | --- | --- |',
    ...(Object.keys(EVENTS) as JobEvent[]).map((event) => {
      const { from, to, attempt, budget, stops } = EVENTS[event];
      const cost = { spent: 'spent', back: 'given back', none: '' }[attempt];
      return `| \`${event}\` | ${TEXT[event]} | ${from} | ${to}${stops ? ' ¹' : ''} | ${cost} | ${budget ? `\`${budget}\`` : ''} |`;
    }),
  ].join('\n');

function diagram(): string {
  const edges = new Map<string, string[]>();
  const edge = (from: JobState | '[*]', to: JobState | '[*]', label: string): void => {
    if (from === to) return;
    const key = `${from} --> ${to}`;
    edges.set(key, [...(edges.get(key) ?? []), label]);
  };
  for (const to of ['ready', 'scheduled', 'blocked'] as const) edge('[*]', to, 'enqueue');
  for (const [event, { from, to }] of Object.entries(EVENTS)) edge(from, to, event);
  for (const [command, effects] of Object.entries(COMMANDS)) {
    for (const [from, effect] of Object.entries(effects) as [JobState, string][]) {
      const to = { hurried: 'ready', retried: 'ready', resumed: 'ready', revoked: 'cancelled' }[effect] ?? effect;
      if ((JOB_STATES as readonly string[]).includes(to)) edge(from, to as JobState, command);
    }
  }
  const lines = [...edges].map(([key, labels]) => `  ${key}: ${[...new Set(labels)].join(', ')}`);
  return ['stateDiagram-v2', ...lines].join('\n');
}

const page = (): string => `# States of a job

Every job stands in one row of one of four tables, and which one that is, is its state. These tables are data in
[\`transitions.ts\`](../../libs/lease/src/jobs/transitions.ts); the database's functions are made from them, every cell is tried by
[\`transitions.spec.ts\`](../../test/transitions.spec.ts), and this page is printed from them.

| state | |
| --- | --- |
| ready | may be started now |
| scheduled | waits for its time: a delay, a backoff, a snooze |
| blocked | waits for the running job of its key, or for a place of its concurrency key |
| paused | set aside by somebody, until it is resumed |
| running | under a lease of a worker |
| completed, failed, cancelled | finished |

\`\`\`mermaid
${diagram()}
\`\`\`

## Commands

What somebody outside asks for. — is an \`IllegalTransitionError\`, and nothing is changed.

${commandTable()}

## Events

What the machinery and the holder of the lease report.

${eventTable()}

¹ A request to cancel outranks everything but a success and makes it cancelled; then a spent budget makes it failed; then a request to pause makes it
paused. Leaving \`running\` clears the lease and the requests on it.
`;

it('R22 docs/guide/states.md prints the tables', () => {
  if (process.env.WRITE_DOCS === '1') writeFileSync('docs/guide/states.md', page());
  expect(readPage('docs/guide/states.md')).toBe(page());
});

it('R22 every state has a way in and, unless it is the end, a way out', () => {
  for (const state of JOB_STATES) {
    expect([state, diagram().includes(`--> ${state}:`)]).toEqual([state, true]);
    expect([state, diagram().includes(`  ${state} -->`)]).toEqual([state, true]);
  }
});
