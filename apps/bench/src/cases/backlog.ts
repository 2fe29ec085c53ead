import type { ContenderName } from '../contenders/contender';
import { costs } from '../measure/measurement';
import type { Plan } from '../plan';
import { startedBy } from '../trial';
import type { BenchCase } from './bench-case';
import { CONCURRENCY, nodeUsOf } from './drain';

const SAMPLE_MS = 20;

/** The rate at which one process works off the head of a backlog of this size, filled through the public bulk call. */
const backlog = (
  name: string,
  size: number,
  title: string,
  contenders: (plan: Plan) => readonly ContenderName[],
): BenchCase => ({
  name,
  title: `backlog of ${title}, 1 process`,
  unit: 'jobs/s',
  better: 'higher',
  contenders,
  run: ({ lab, plan, contender }) =>
    lab.trial(contender, async (trial) => {
      const jobs = plan.jobs(size, size);
      await trial.operator.call('startProducer', { callers: 2 });
      await trial.fill(jobs);
      await trial.rest();
      const workers = await trial.loadWorkers(1);
      const before = await trial.read();
      const starting = trial.startWorkers(workers, {
        mode: 'throughput',
        concurrency: CONCURRENCY,
        behaviour: 'nothing',
        keepStarts: false,
      });
      await Promise.race([trial.untilStarted(workers, 1), starting.then(() => trial.untilStarted(workers, 1))]);
      // Until the time is up or the backlog is gone, whichever is first.
      const windowMs = plan.seconds(10, 3) * 1000;
      for (let waitedMs = 0; waitedMs < windowMs && startedBy(workers) < jobs; waitedMs += SAMPLE_MS) {
        await trial.pause(SAMPLE_MS);
      }
      const after = await trial.read();
      const stats = await trial.stats(workers);
      await starting;
      const started = stats.reduce((sum, one) => sum + one.started, 0);
      const seconds = stats.reduce((sum, one) => sum + one.lastAt - one.firstAt, 0) / 1000;
      return { value: started / seconds, ...costs(before, after, started, nodeUsOf(stats)), detail: { jobs, started } };
    }),
});

export const backlogCases: BenchCase[] = [
  backlog('backlog100k', 100_000, '100 000 jobs', () => ['ours', 'graphile', 'pgboss']),
  backlog('backlog1m', 1_000_000, '1 000 000 jobs', ({ quick }) => (quick ? ['ours'] : ['ours', 'graphile', 'pgboss'])),
  backlog('backlog5m', 5_000_000, '5 000 000 jobs', ({ quick }) => (quick ? [] : ['ours', 'graphile'])),
];
