import type { ContenderName, HeadKind } from '../contenders/contender';
import type { BenchCase } from './bench-case';
import { drain } from './drain';
import { jobsOf } from './draining';

/** A drain behind many jobs that were added earlier and cannot be run. */
const head = (name: string, kind: HeadKind, what: string, contenders: readonly ContenderName[]): BenchCase => ({
  name,
  title: `drain behind 100 000 jobs ${what}`,
  unit: 'jobs/s',
  better: 'higher',
  contenders: () => contenders,
  run: async ({ lab, plan, contender, soFar }) => {
    const { rssBytes: _, ...measured } = await lab.trial(contender, (trial) =>
      drain(trial, {
        jobs: jobsOf(plan, contender),
        processes: 1,
        head: { kind, count: plan.jobs(100_000, 50_000) },
      }),
    );
    const plain = soFar.get(`drain:${contender}`);
    return { ...measured, detail: { ...measured.detail, ...(plain ? { shareOfDrain: measured.value / plain } : {}) } };
  },
});

export const headCases: BenchCase[] = [
  head('headUnhandled', 'unhandled', 'that nobody handles', ['ours', 'graphile', 'pgboss', 'bullmq', 'bullpg']),
  head('headPaused', 'paused', 'of a paused queue', ['ours', 'bullmq', 'bullpg']),
  head('headFuture', 'future', 'due next year', ['ours', 'graphile', 'pgboss', 'bullmq', 'bullpg']),
];
