import { setTimeout as sleep } from 'node:timers/promises';
import { ROLES, type Role, TTL_MS } from '../settings';
import { type Fault, type Stage, anyone } from './fault';
import type { Worker } from '../fleet';

const ALL_ROLES = Object.keys(ROLES) as Role[];

/** Something that happens to the connections of one worker that are for one thing. */
const onLine =
  (act: (worker: Worker, applicationName: RegExp, stage: Stage) => Promise<string> | string): Fault =>
  async (stage) => {
    const victim = anyone(stage);
    const role = stage.random.pick(ALL_ROLES);
    if (!victim) return undefined;
    return { victim: victim.name, detail: `${role}: ${await act(victim, ROLES[role], stage)}` };
  };

export const cutLine = onLine(({ line }, applicationName) => `${line.cut({ applicationName })} cut`);

export const delayLine = onLine(async ({ line }, applicationName, { random }) => {
  const [delay, ms] = [random.int(20, 700), random.int(500, TTL_MS * 2)];
  line.delay(delay, { applicationName });
  await sleep(ms);
  line.delay(0, { applicationName });
  return `${delay} ms more, for ${ms} ms`;
});

/** What is sent goes nowhere, and nobody is told. */
export const blackHole = onLine(async ({ line }, applicationName, { random }) => {
  const ms = random.int(300, TTL_MS * 2);
  line.freeze({ applicationName });
  await sleep(ms);
  line.thaw({ applicationName });
  return `for ${ms} ms`;
});

/** The server’s end is gone and the worker is not told, or the other way round. */
export const halfOpen = onLine(({ line }, applicationName, { random }) => {
  const side = random.pick(['client', 'server'] as const);
  return `${line.forsake(side, { applicationName })} of which the ${side} has ended`;
});

/** Everything of one worker: it is cut off. */
export const partition: Fault = async (stage) => {
  const victim = anyone(stage);
  const [ms, silent] = [stage.random.int(300, TTL_MS * 3), stage.random.chance(0.5)];
  if (!victim) return undefined;
  if (silent) victim.line.freeze();
  else victim.line.refuse();
  await sleep(ms);
  if (silent) victim.line.thaw();
  else victim.line.refuse(false);
  return { victim: victim.name, detail: `${silent ? 'silent' : 'refused'} for ${ms} ms` };
};

/** The database does what it is asked, commits, and its answer is lost. */
export const loseReplies: Fault = async (stage) => {
  const victim = anyone(stage);
  const times = stage.random.int(1, 4);
  if (!victim) return undefined;
  const lost = victim.line.dropRepliesAfter(/leasehold_step|leasehold_after_members|move_v1|COMMIT/, { times });
  await sleep(1000);
  lost.cancel();
  return { victim: victim.name, detail: `${lost.count} answers` };
};

/** The same for who enqueues. */
export const loseAnswers: Fault = async ({ clients, random }) => {
  const lost = clients.line.dropRepliesAfter(/leasehold_enqueue|steer_v1|COMMIT/, { times: random.int(1, 4) });
  await sleep(500);
  lost.cancel();
  return { victim: null, detail: `${lost.count} answers to producers` };
};
