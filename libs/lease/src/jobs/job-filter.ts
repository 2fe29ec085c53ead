import { InvalidJobError } from '../errors';
import { didYouMean } from '../options/suggest';
import { JOB_STATES, type JobState, type JobStatus } from './job.types';

/** Which jobs: those that fit everything that is given. */
export interface JobFilter {
  state?: JobState;
  kind?: string;
  queue?: string;
  /** Jobs with this tag. */
  tag?: string;
  /** Members of this batch. */
  batchId?: string;
}

export interface FindJobs extends JobFilter {
  /** 1 to 1000, default 50. */
  limit?: number;
  /** `next` of the page before. */
  after?: string;
}

export interface JobPage {
  /** Newest first. */
  jobs: JobStatus[];
  /** Pass as `after` to get the next page; null at the end. */
  next: string | null;
}

/** The filter as a statement's parameters. @throws InvalidJobError for a state that there is not */
export function filterOf({ state, kind, queue, tag, batchId }: JobFilter): {
  state: JobState | undefined;
  kind: string | null;
  queue: string | null;
  tag: string | null;
  batchId: string | null;
} {
  if (state !== undefined && !JOB_STATES.includes(state)) {
    throw new InvalidJobError(
      `state = '${String(state)}' is none of ${JOB_STATES.join(', ')}${didYouMean(String(state), JOB_STATES)}`,
      'state',
    );
  }
  if (batchId !== undefined) assertId(batchId, 'batchId');
  return { state, kind: kind ?? null, queue: queue ?? null, tag: tag ?? null, batchId: batchId ?? null };
}

export function assertId(id: unknown, field: string): void {
  if (typeof id !== 'string' || !/^\d{1,19}$/.test(id) || BigInt(id) > 9_223_372_036_854_775_807n) {
    throw new InvalidJobError(`${field} = ${JSON.stringify(id)} is no job id: ids are decimal text`, field);
  }
}
