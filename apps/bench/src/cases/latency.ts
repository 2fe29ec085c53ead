import { CONTENDERS } from '../contenders/contender';
import { costs } from '../measure/measurement';
import { percentile } from '../measure/statistics';
import type { BenchCase } from './bench-case';
import { CONCURRENCY } from './drain';

/** A worker that has just started polls more often than one that idles. */
const IDLE_MS = 1500;
const WARM_UP_SECONDS = 1;
const LATE_MS = 20_000;

/** Adds at a fixed rate in one process while another waits for jobs. */
const latency = (rate: number): BenchCase => ({
  name: `latency${rate}`,
  title: `from the call that adds to the start of the handler, ${rate} jobs a second, idle worker`,
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
      const fromStored: number[] = [];
      const fromCall: number[] = [];
      for (let i = 0; i < jobs; i++) {
        const startedAt = starts.get(from + i) ?? NaN;
        fromStored.push(startedAt - (storedAt[i] ?? NaN));
        fromCall.push(startedAt - (calledAt[i] ?? NaN));
      }
      await trial.stopWorkers(workers);
      return {
        value: percentile(fromCall, 0.5),
        ...costs(before, after, jobs, (statsAfter?.cpuUs ?? NaN) - (statsBefore?.cpuUs ?? NaN)),
        detail: {
          jobs,
          p99Ms: percentile(fromCall, 0.99),
          storedToStartP50Ms: percentile(fromStored, 0.5),
          storedToStartP99Ms: percentile(fromStored, 0.99),
        },
      };
    }),
});

export const latencyCases: BenchCase[] = [latency(20), latency(500)];
