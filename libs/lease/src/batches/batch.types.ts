import type { EnqueueOptions } from '../jobs/enqueue-request';
import type { HandlerClass, PayloadOf } from '../handlers/handler.types';
import type { JobError, JobState } from '../jobs/job.types';
import type { CallerTransaction } from '../storage/caller-transaction';
import type { Lease } from '../handlers/lease';

/** A batch's id: a bigint as decimal text. */
export type BatchId = string;

/**
 * `untouched`: no members yet. `running`: something of it is unfinished, or it is open. Then, once a generation: `failed` if any member failed, `cancelled` if
 * all were cancelled, else `completed` (R30).
 */
export type BatchStatus = 'untouched' | 'running' | 'completed' | 'failed' | 'cancelled';

/** What a member waits for: that the one of this name has completed; or, with `on: 'finished'`, has ended in whatever way. */
export type DependsOn = string | { name: string; on: 'completed' | 'finished' };

type MemberOptions = Omit<EnqueueOptions, keyof CallerTransaction | 'key' | 'keyMode' | 'keyScope'>;

/** One job of a batch. */
export interface BatchMember extends MemberOptions {
  handler: HandlerClass | string;
  payload: unknown;
  /** Unique in the batch, 1 to 200 bytes. Others depend on it by this, and adding the same name again adds nothing. */
  name?: string;
  /** Names of members that it waits for. None: it may start at once. */
  dependsOn?: readonly DependsOn[];
}

/**
 * A job that is enqueued when a batch ends, once a generation, in the transaction that ends it. Its payload is an object: what is given, plus `batch`, a
 * {@link BatchEnd}.
 */
export interface BatchHook extends MemberOptions {
  handler: HandlerClass | string;
  payload?: object;
}

/** How a batch ended: `payload.batch` of its hooks. */
export interface BatchEnd {
  id: BatchId;
  name: string;
  status: Exclude<BatchStatus, 'untouched' | 'running'>;
  generation: number;
  completed: number;
  failed: number;
  cancelled: number;
}

export interface BatchOptions extends CallerTransaction {
  /** More members may be added until `seal` is called; it does not end before. Default false. */
  open?: boolean;
  /** The first member that fails for good cancels the rest. Default false. */
  failFast?: boolean;
  /** What a batch that is sealed without members is: an error, or completed at once. Default 'refuse'. */
  ifEmpty?: 'refuse' | 'complete';
  onCompleted?: BatchHook | HandlerClass;
  onFailed?: BatchHook | HandlerClass;
  /** Whatever the status. */
  onFinished?: BatchHook | HandlerClass;
}

export interface AddOptions extends CallerTransaction {
  /** The lease under which this is done: it is done only if that is still held then (R17). */
  under?: Lease;
}

export interface SealOptions extends AddOptions, Pick<BatchOptions, 'ifEmpty'> {}

export interface CreatedBatch {
  id: BatchId;
  /** The members' jobs, in the order given. */
  jobIds: string[];
}

export interface AddedMembers {
  /** In the order given; of a name that was there already, the job that has it. */
  jobIds: string[];
  added: number;
  /** Names that were there already. */
  existing: string[];
}

/** A batch, with its members counted by state. */
export interface BatchInfo {
  id: BatchId;
  name: string;
  status: BatchStatus;
  /** A member has failed; with `running`, it will end as `failed`. */
  failing: boolean;
  /** It is being cancelled. */
  stopping: boolean;
  sealed: boolean;
  failFast: boolean;
  /** 1, and one more with each retry after its end. */
  generation: number;
  createdAt: Date;
  /** Beginning of this generation. */
  since: Date;
  finishedAt: Date | null;
  counts: Record<JobState, number>;
  members: number;
  /** Members that have ended, as a share of all: 0 to 1. */
  done: number;
  /** When it ends if it goes on at the pace it had so far; null: nothing has ended yet, or it is open, or has ended; or in a generation after the first. */
  estimatedEnd: Date | null;
}

export interface FindBatches {
  status?: 'running' | 'completed' | 'failed' | 'cancelled';
  name?: string;
  /** 1 to 1000, default 50. */
  limit?: number;
  /** `next` of the page before. */
  after?: BatchId;
}

/** A batch as a list shows it: without counting its members. */
export type BatchSummary = Pick<
  BatchInfo,
  'id' | 'name' | 'sealed' | 'failFast' | 'stopping' | 'generation' | 'createdAt' | 'since' | 'finishedAt'
> & { status: Exclude<BatchStatus, 'untouched'> };

export interface BatchPage {
  /** Newest first. */
  batches: BatchSummary[];
  next: BatchId | null;
}

/** What became of one member that has ended. */
export interface MemberResult<R = unknown> {
  jobId: string;
  name: string | null;
  kind: string;
  state: 'completed' | 'failed' | 'cancelled';
  result: R | null;
  reason: string | null;
  error: JobError | null;
}

export type PayloadsOf<T> = T extends HandlerClass ? readonly PayloadOf<T>[] : readonly unknown[];
