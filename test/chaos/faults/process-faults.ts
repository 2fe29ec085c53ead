import { setTimeout as sleep } from 'node:timers/promises';
import type { Oddity, Worker } from '../fleet';
import { TTL_MS } from '../settings';
import { type Fault, type Stage, anyone, leaderOf } from './fault';

type Choice = (stage: Stage) => Worker | undefined | Promise<Worker | undefined>;

const killing =
  (choose: Choice): Fault =>
  async (stage) => {
    const victim = await choose(stage);
    if (!victim) return undefined;
    victim.kill('SIGKILL');
    await victim.exited;
    return { victim: victim.name };
  };

export const kill = killing(anyone);
export const killLeader = killing(leaderOf);

/** Shorter than a TTL, when nothing may happen, or longer, when everything that it held is taken. */
const freezing =
  (choose: Choice): Fault =>
  async (stage) => {
    const victim = await choose(stage);
    const ms = stage.random.int(200, TTL_MS * 3);
    if (!victim) return undefined;
    victim.kill('SIGSTOP');
    await sleep(ms);
    victim.kill('SIGCONT');
    return { victim: victim.name, detail: `${ms} ms` };
  };

export const freeze = freezing(anyone);
export const freezeLeader = freezing(leaderOf);

/** A deploy: told to end, and either waited for or killed half-way. */
export const redeploy: Fault = async (stage) => {
  const victim = anyone(stage);
  const patience = stage.random.pick([50, 500, 10_000]);
  if (!victim) return undefined;
  victim.kill('SIGTERM');
  await Promise.race([victim.exited, sleep(patience)]);
  if (victim.alive) victim.kill('SIGKILL');
  await victim.exited;
  return { victim: victim.name, detail: `${patience} ms of patience` };
};

/** One more worker that is odd, for a while; then it is told to end. */
const odd =
  (oddity: (stage: Stage) => Oddity): Fault =>
  async (stage) => {
    const what = oddity(stage);
    const ms = stage.random.int(1000, TTL_MS * 2);
    const worker = await stage.fleet.start(what);
    if (!worker) return undefined;
    await sleep(ms);
    worker.kill('SIGTERM');
    await Promise.race([worker.exited, sleep(10_000)]);
    if (worker.alive) worker.kill('SIGKILL');
    return { victim: worker.name, detail: `${JSON.stringify(what)} for ${ms} ms` };
  };

/** In the midst of a rolling deploy: a worker that does not know a kind. */
export const olderCode = odd(() => ({ lacksKind: true }));
export const clockSkew = odd(({ random }) => ({
  clockOffsetMs: random.pick([-1, 1]) * random.pick([30_000, 600_000, 3_600_000]),
}));

export const block: Fault = async (stage) => {
  const victim = anyone(stage);
  const ms = stage.random.int(500, TTL_MS * 2);
  if (!victim) return undefined;
  victim.tell({ block: ms });
  await sleep(ms);
  return { victim: victim.name, detail: `${ms} ms` };
};

/** The thread that renews the worker's lease, alone. */
export const endBeat: Fault = (stage) => {
  const victim = anyone(stage);
  victim?.tell({ endBeat: true });
  return Promise.resolve(victim && { victim: victim.name });
};

/** All connections of its pool are taken. */
export const hogPool: Fault = async (stage) => {
  const victim = anyone(stage);
  const ms = stage.random.int(300, TTL_MS);
  if (!victim) return undefined;
  victim.tell({ hog: ms });
  await sleep(ms);
  return { victim: victim.name, detail: `${ms} ms` };
};

/** A job that ends its process, until its crash budget is spent. */
export const poison: Fault = async ({ clients }) => {
  const id = await clients.poison().catch(() => undefined);
  return id === undefined ? undefined : { victim: null, detail: `job ${id}` };
};
