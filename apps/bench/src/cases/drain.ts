import type { AgentProcess } from '../contenders/agent-process';
import type { HeadKind, Mode } from '../contenders/contender';
import { type Behaviour, type Stats, tickOf } from '../contenders/protocol';
import { type Measurement, costs } from '../measure/measurement';
import type { Trial } from '../trial';

export interface DrainOptions {
  jobs: number;
  processes: number;
  mode?: Mode;
  concurrency?: number;
  behaviour?: Behaviour;
  payloadBytes?: number;
  /** As batches of so many members. */
  batchesOf?: number;
  /** Jobs that cannot run, added first. */
  head?: { kind: HeadKind; count: number };
}

export const CONCURRENCY = 100;

/**
 * Adds jobs, lets the store come to rest, and has them all done by processes that are loaded but not started yet. Jobs per second from
 * the moment when each process has started a handler, until no job is left.
 */
export async function drain(trial: Trial, options: DrainOptions): Promise<Measurement & { rssBytes: number }> {
  const { jobs, processes, payloadBytes, batchesOf, head } = options;
  await trial.operator.call('startProducer', { callers: 2 });
  if (head) await trial.operator.call('fillHead', head);
  await trial.fill(jobs, payloadBytes, batchesOf);
  await trial.rest();
  const workers = await trial.loadWorkers(processes);
  const deadBefore = await trial.database?.deadMade();
  const before = await trial.read();
  const starting = startAll(trial, workers, options);
  await Promise.race([trial.untilStarted(workers, jobs), starting.then(() => trial.untilStarted(workers, jobs))]);
  const endAt = await trial.untilEmpty();
  const after = await trial.read();
  const stats = await trial.stats(workers);
  await starting;
  await trial.stopWorkers(workers);
  const deadAfter = await trial.database?.deadMade();

  const working = stats.filter(({ started }) => started > 0);
  // Before that some of the processes were still getting going, and took the cores from those that worked.
  const allAt = Math.max(...working.map(({ firstAt }) => firstAt));
  const startedBefore = working.reduce((sum, one) => sum + startedUntil(one, allAt), 0);
  return {
    value: ((jobs - startedBefore) * 1000) / (endAt - allAt),
    ...costs(before, after, jobs, nodeUsOf(working)),
    ...(deadBefore === undefined || deadAfter === undefined ? {} : { deadTuples: (deadAfter - deadBefore) / jobs }),
    detail: { jobs, ...(processes > 1 ? { startedBefore } : {}) },
    rssBytes: Math.max(...stats.map(({ rssBytes }) => rssBytes)),
  };
}

const startedUntil = ({ firstAt, startsByTick }: Stats, at: number): number =>
  startsByTick.slice(0, Math.max(0, tickOf(at) - tickOf(firstAt))).reduce((sum, count) => sum + count, 0);

/** CPU of the working processes since their first job: the boot is not a cost of a job. */
export const nodeUsOf = (stats: Stats[]): number =>
  stats.reduce((sum, { cpuUs, cpuUsAtFirst }) => sum + cpuUs - cpuUsAtFirst, 0);

async function startAll(trial: Trial, workers: AgentProcess[], options: DrainOptions): Promise<void> {
  const { mode = 'throughput', concurrency = CONCURRENCY, behaviour = 'nothing' } = options;
  await trial.startWorkers(workers, { mode, concurrency, behaviour, keepStarts: false });
}
