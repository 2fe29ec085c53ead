import { Client } from 'pg';
import { monotonicMs } from '../contenders/protocol';
import type { Trial } from '../trial';
import { startedBy } from '../trial';
import type { AgentProcess } from '../contenders/agent-process';
import type { BenchCase } from './bench-case';
import { CONCURRENCY } from './drain';

const BATCH = 100;
/** The first part of the base is a warm-up. */
const BASE_FROM = 1 / 3;
const LAST_FROM = 2 / 3;

interface Sample {
  atMs: number;
  started: number;
  serverUs: number;
}

async function sample(trial: Trial, workers: AgentProcess[]): Promise<Sample> {
  return { atMs: monotonicMs(), started: startedBy(workers), serverUs: (await trial.read()).cpuUs ?? NaN };
}

/** Waits to the end of a phase and samples its later part. */
async function phase(trial: Trial, workers: AgentProcess[], seconds: number, from: number): Promise<[Sample, Sample]> {
  await trial.pause(seconds * from * 1000);
  const first = await sample(trial, workers);
  await trial.pause(seconds * (1 - from) * 1000);
  return [first, await sample(trial, workers)];
}

const cpuPerJob = ([from, to]: [Sample, Sample]): number =>
  (to.serverUs - from.serverUs) / Math.max(1, to.started - from.started);

const rateOf = ([from, to]: [Sample, Sample]): number => ((to.started - from.started) * 1000) / (to.atMs - from.atMs);

/** What a forgotten transaction costs: while its snapshot is held, no vacuum removes what the queue leaves behind. */
export const snapshotCases: BenchCase[] = [
  {
    name: 'snapshot',
    title: 'server CPU a job after a snapshot was held for 60 s (15 s if quick), times that before',
    unit: 'times',
    better: 'lower',
    contenders: () => ['ours', 'graphile', 'pgboss'],
    run: ({ lab, plan, contender }) =>
      lab.trial(contender, async (trial) => {
        const rate = plan.pick(4000, 2000);
        const workers = await trial.loadWorkers(1);
        await trial.operator.call('startProducer', { callers: 4 });
        await trial.startWorkers(workers, {
          mode: 'throughput',
          concurrency: CONCURRENCY,
          behaviour: 'nothing',
          keepStarts: false,
        });
        await trial.operator.call('startStream', { rate, batch: BATCH });
        const base = await phase(trial, workers, plan.seconds(15, 5, 1), BASE_FROM);
        const holder = new Client({ connectionString: trial.database?.url ?? '' });
        holder.on('error', () => undefined);
        await holder.connect();
        try {
          await holder.query('BEGIN ISOLATION LEVEL REPEATABLE READ');
          await holder.query('SELECT count(*) FROM pg_class');
          const last = await phase(trial, workers, plan.seconds(60, 15, 1), LAST_FROM);
          const backlog = trial.operator.progress.added - startedBy(workers);
          const deadNow = (await trial.database?.deadNow()) ?? NaN;
          await trial.operator.call('stopStream');
          return {
            value: cpuPerJob(last) / cpuPerJob(base),
            cpuUs: { server: cpuPerJob(last) },
            detail: {
              rate,
              keptUp: rateOf(last) / rate,
              baseServerUs: cpuPerJob(base),
              backlog,
              deadTuplesHeld: deadNow,
            },
          };
        } finally {
          await holder.end();
        }
      }),
  },
];
