import { CONTENDERS } from '../contenders/contender';
import type { BenchCase } from './bench-case';
import { drain } from './drain';

export const memoryCases: BenchCase[] = [
  {
    name: 'memory',
    title: 'resident memory of a worker process after a drain',
    unit: 'MB',
    better: 'lower',
    contenders: () => CONTENDERS,
    run: async ({ lab, plan, contender }) => {
      const jobs = contender === 'bullpg' ? plan.jobs(5000, 1000) : plan.jobs(50_000, 20_000);
      const { rssBytes } = await lab.trial(contender, (trial) => drain(trial, { jobs, processes: 1 }));
      return { value: rssBytes / 1e6, detail: { jobs } };
    },
  },
];
