import type { BenchCase } from './bench-case';
import { drain } from './drain';
import { jobsOf } from './draining';

/** The same drain, of jobs that are members of batches: completing one must not get dearer as its batch grows (R31). */
const batches = (members: number, quick = members): BenchCase => ({
  name: `batches${members}`,
  title: `drain of batches of ${members.toLocaleString('en').replaceAll(',', ' ')} members`,
  unit: 'jobs/s',
  better: 'higher',
  contenders: () => ['ours'],
  run: async ({ lab, plan, contender, soFar }) => {
    const batchesOf = plan.pick(members, quick);
    const { rssBytes: _, ...measured } = await lab.trial(contender, (trial) =>
      drain(trial, { jobs: jobsOf(plan, contender), processes: 1, batchesOf }),
    );
    const plain = soFar.get(`drain:${contender}`);
    return {
      ...measured,
      detail: { ...measured.detail, batchesOf, ...(plain ? { shareOfDrain: measured.value / plain } : {}) },
    };
  },
});

export const batchCases: BenchCase[] = [batches(100), batches(10_000), batches(100_000, 60_000)];
