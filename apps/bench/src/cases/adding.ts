import { CONTENDERS } from '../contenders/contender';
import type { AddResult } from '../contenders/protocol';
import { costs } from '../measure/measurement';
import type { Trial } from '../trial';
import type { BenchCase } from './bench-case';

const WARM_UP_SECONDS = 0.3;
const BULK = 1000;

type Add = (trial: Trial, seconds: number) => Promise<AddResult>;

const adding = (name: string, title: string, callers: number, add: Add): BenchCase => ({
  name,
  title,
  unit: 'jobs/s',
  better: 'higher',
  contenders: () => CONTENDERS,
  run: ({ lab, plan, contender }) =>
    lab.trial(contender, async (trial) => {
      await trial.operator.call('startProducer', { callers });
      await add(trial, WARM_UP_SECONDS);
      await trial.rest();
      const deadBefore = await trial.database?.deadMade();
      const before = await trial.read();
      const { jobs, seconds, p50, p99, cpuUs } = await add(trial, plan.seconds(6, 2));
      const after = await trial.read();
      await trial.endOperator();
      const deadAfter = await trial.database?.deadMade();
      return {
        value: jobs / seconds,
        ...costs(before, after, jobs, cpuUs),
        ...(deadBefore === undefined || deadAfter === undefined ? {} : { deadTuples: (deadAfter - deadBefore) / jobs }),
        detail: { jobs, callP50Ms: p50, callP99Ms: p99 },
      };
    }),
});

const oneByOne =
  (callers: number): Add =>
  (trial, seconds) =>
    trial.operator.call('addFor', { callers, seconds });

export const addingCases: BenchCase[] = [
  adding('add1', 'adding one by one, 1 caller', 1, oneByOne(1)),
  adding('add16', 'adding one by one, 16 callers', 16, oneByOne(16)),
  adding('bulk', 'adding 1 000 in a call', 1, (trial, seconds) =>
    trial.operator.call('bulkFor', { batch: BULK, seconds }),
  ),
];
