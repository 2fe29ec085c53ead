import { CONTENDERS } from '../contenders/contender';
import { costs } from '../measure/measurement';
import { percentile } from '../measure/statistics';
import type { BenchCase } from './bench-case';
import { CONCURRENCY } from './drain';

/** A worker that has just started polls more often than one that idles. */
const IDLE_MS = 1500;
const WARM_UP_SECONDS = 1;
/** A job may start before the call that added it has returned: the answers travel side by side. Less than that is not told apart. */
const LEAST_MS = 0.1;
const LATE_MS = 20_000;

/** Adds at a fixed rate in one process while another waits for jobs. */
const latency = (rate: number): BenchCase => ({
  name: `latency${rate}`,
  title: `from the commit to the start, ${rate} jobs a second, idle worker`,
  unit: 'ms',
  better: 'lower',
  contenders: () => CONTENDERS,
  run: ({ lab, plan, contender }) =>
    lab.trial(contender, async (trial) => {
      const workers = await trial.loadWorkers(1);
      await trial.operator.call('startProducer', { callers: 16 });
      await trial.startWorkers(workers, {
        mode: 'latency',
        concurrency: CONCURRENCY,
        behaviour: 'nothing',
        keepStarts: true,
      });
      await trial.pause(IDLE_MS);
      const warmUp = await trial.operator.call('openLoop', { rate, seconds: WARM_UP_SECONDS, from: 0 });
      const from = warmUp.calledAt.length;
      const [statsBefore] = await trial.stats(workers);
      const before = await trial.read();
      const { calledAt, storedAt } = await trial.operator.call('openLoop', {
        rate,
        seconds: plan.seconds(20, 4, 1),
        from,
      });
      const jobs = calledAt.length;
      await trial.untilStarted(workers, from + jobs, LATE_MS);
      const after = await trial.read();
      const [statsAfter] = await trial.stats(workers);
      const [worker] = workers;
      const starts = new Map(await worker?.call('starts'));
      const fromCommit: number[] = [];
      const fromCall: number[] = [];
      for (let i = 0; i < jobs; i++) {
        const startedAt = starts.get(from + i) ?? NaN;
        fromCommit.push(Math.max(LEAST_MS, startedAt - (storedAt[i] ?? NaN)));
        fromCall.push(startedAt - (calledAt[i] ?? NaN));
      }
      await trial.stopWorkers(workers);
      return {
        value: percentile(fromCommit, 0.5),
        ...costs(before, after, jobs, (statsAfter?.cpuUs ?? NaN) - (statsBefore?.cpuUs ?? NaN)),
        detail: {
          jobs,
          p99Ms: percentile(fromCommit, 0.99),
          callToStartP50Ms: percentile(fromCall, 0.5),
          callToStartP99Ms: percentile(fromCall, 0.99),
        },
      };
    }),
});

export const latencyCases: BenchCase[] = [latency(20), latency(500)];
