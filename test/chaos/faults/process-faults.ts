import { setTimeout as sleep } from 'node:timers/promises';
import type { Worker } from '../fleet';
import { TTL_MS } from '../settings';
import type { Fault, Stage } from './fault';

const anyone = ({ fleet, random }: Stage): Worker | undefined => {
  const { up } = fleet;
  // One at least goes on.
  return up.length > 1 ? random.pick(up) : undefined;
};

export const kill: Fault = async (stage) => {
  const victim = anyone(stage);
  victim?.kill('SIGKILL');
  await victim?.exited;
  return victim?.name;
};

/** Shorter than a TTL, when nothing may happen, or longer, when everything that it held is taken. */
export const freeze: Fault = async (stage) => {
  const victim = anyone(stage);
  const ms = stage.random.int(200, TTL_MS * 3);
  if (!victim) return undefined;
  victim.kill('SIGSTOP');
  await sleep(ms, undefined, { signal: stage.signal }).catch(() => undefined);
  victim.kill('SIGCONT');
  return `${victim.name} for ${ms} ms`;
};

/** A deploy: told to end, and either waited for or killed half-way. */
export const redeploy: Fault = async (stage) => {
  const victim = anyone(stage);
  const patience = stage.random.pick([50, 500, 10_000]);
  if (!victim) return undefined;
  victim.kill('SIGTERM');
  await Promise.race([victim.exited, sleep(patience)]);
  if (victim.alive) victim.kill('SIGKILL');
  await victim.exited;
  return `${victim.name}, ${patience} ms of patience`;
};

export const block: Fault = (stage) => {
  const victim = anyone(stage);
  const ms = stage.random.int(500, TTL_MS * 2);
  if (victim?.alive) victim.child.send({ block: ms });
  return Promise.resolve(victim && `${victim.name} for ${ms} ms`);
};
