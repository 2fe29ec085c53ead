import { InvalidOptionError } from '../errors';
import { DrainLimitError, JobsFailedError } from './errors';
import { type RunReport, thrownAs } from './run-report';
import type { Selection, TestWorker } from './test-worker';

/** How to drain. */
export interface DrainOptions {
  /** Only this queue. Default: all that the module serves. */
  queue?: string;
  /** Runs at most, from 1. Default 1000: more than a test means, so that a job which always comes back ends as an error. */
  maxRuns?: number;
  /**
   * Whether jobs whose last run failed make the drain throw, when it has run everything. Default true: a test that drains expects its jobs done,
   * and shall show the handler's own error. With false the reports tell, for tests of failing.
   */
  throwOnFailure?: boolean;
}

const DEFAULT_RUNS = 1000;
const LISTED = 10;

export async function drain(
  worker: TestWorker,
  selection: Selection,
  { maxRuns = DEFAULT_RUNS, throwOnFailure = true }: DrainOptions,
): Promise<RunReport[]> {
  if (!Number.isInteger(maxRuns) || maxRuns < 1) {
    throw new InvalidOptionError(`maxRuns = ${maxRuns} must be a whole number from 1`);
  }
  const runs: RunReport[] = [];
  for (;;) {
    if (runs.length === maxRuns && (await worker.look(selection)).length > 0) throw limitError(runs);
    const run = await worker.runNext(selection);
    if (!run) break;
    runs.push(run);
  }
  const failed = [...new Map(runs.map((run) => [run.job.id, run])).values()].filter(
    ({ outcome }) => outcome === 'failed' || outcome === 'dead',
  );
  if (throwOnFailure && failed.length > 0) throw failedError(failed);
  return runs;
}

function failedError(failed: RunReport[]): JobsFailedError {
  const lines = failed
    .slice(0, LISTED)
    .map(
      ({ job, error }) => `  ${job.id} (${job.kind}), now ${job.state}: ${error?.name ?? 'Error'}: ${error?.message}`,
    );
  const more = failed.length > LISTED ? [`  and ${failed.length - LISTED} more`] : [];
  const [first] = failed;
  return new JobsFailedError(
    [
      `${failed.length} ${failed.length === 1 ? 'job' : 'jobs'} failed in the drain (throwOnFailure: false returns the reports instead):`,
      ...lines,
      ...more,
    ].join('\n'),
    failed,
    first?.error ? { cause: thrownAs(first.error) } : undefined,
  );
}

function limitError(runs: RunReport[]): DrainLimitError {
  const byKind = new Map<string, RunReport[]>();
  for (const run of runs) byKind.set(run.job.kind, [...(byKind.get(run.job.kind) ?? []), run]);
  const lines = [...byKind]
    .sort(([, a], [, b]) => b.length - a.length)
    .map(([kind, ofKind]) => {
      const ids = [...new Set(ofKind.map(({ job }) => job.id))];
      const last =
        ids.length > 3 ? `${ids.length} jobs, the last are ${ids.slice(-3).join(', ')}` : `job ${ids.join(', ')}`;
      return `  ${kind}: ${ofKind.length} runs, ${last}`;
    });
  return new DrainLimitError(
    [
      `The drain has run ${runs.length} jobs and more are due. A handler that enqueues its own kind, or puts itself off by nothing, never ends:`,
      ...lines.slice(0, LISTED),
      'Run such jobs by runNext(), or raise maxRuns',
    ].join('\n'),
    runs,
  );
}
