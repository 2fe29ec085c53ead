import { Injectable } from '@nestjs/common';
import type { HandlerClass, PayloadOf, ResultOf } from '../handlers/handler.types';
import type { EnqueueOptions, EnqueueTransaction } from './enqueue-request';
import type { EnqueueAnswer } from './enqueuer';
import { type EnqueueItem, JobEnqueue, type JobTarget } from './job-enqueue';
import type { FindJobs, JobFilter, JobPage } from './job-filter';
import { JobReader } from './job-reader';
import { JobSteering, type SteerManyOptions, type SteerOptions, type SteerSummary, type Steered } from './job-steering';
import { JobWaiter, type WaitOptions } from './job-waiter';
import type { JobState, JobStatus } from './job.types';
import type { JobCommand } from './transitions';

/** An enqueued job's id: a bigint as decimal text. */
export type JobId = string;

type Payload<T> = T extends HandlerClass ? PayloadOf<T> : unknown;

/** Enqueues jobs, says what has become of them, and steers them: from any process. */
@Injectable()
export class JobsService {
  constructor(
    private readonly enqueueing: JobEnqueue,
    private readonly reader: JobReader,
    private readonly steering: JobSteering,
    private readonly waiter: JobWaiter,
  ) {}

  /**
   * Enqueues one job: by its handler's class, which types the payload, or by its kind's name, also for a kind that only other processes
   * handle. In the caller's transaction if one is given. With a `key`: the job that holds it, see `enqueueUnique`.
   * @throws InvalidJobError naming the field, nothing written; EnqueueUncertainError when the reply was lost and there is no key
   */
  async enqueue<T extends JobTarget>(target: T, payload: Payload<T>, options: EnqueueOptions = {}): Promise<JobId> {
    return (await this.enqueueing.one(target, payload, options)).id;
  }

  /** The same for a job with a `key`, and says whether it was created, replaced, or is held by an existing job, and in which state that is. */
  enqueueUnique<T extends JobTarget>(
    target: T,
    payload: Payload<T>,
    options: EnqueueOptions & { key: string },
  ): Promise<EnqueueAnswer> {
    return this.enqueueing.one(target, payload, options);
  }

  /**
   * Enqueues up to 200 000 jobs, all or nothing, and returns their ids in the order given: many payloads of one handler with the same
   * options, or a mixed lot. An empty list returns an empty list. At most 10 000 of them may have a key.
   */
  enqueueMany<T extends JobTarget>(
    target: T,
    payloads: readonly Payload<T>[],
    options?: EnqueueOptions,
  ): Promise<JobId[]>;
  enqueueMany(items: readonly EnqueueItem[], transaction?: EnqueueTransaction): Promise<JobId[]>;
  enqueueMany(
    first: JobTarget | readonly EnqueueItem[],
    second: readonly unknown[] | EnqueueTransaction = {},
    third: EnqueueOptions = {},
  ): Promise<JobId[]> {
    return this.enqueueing.many(first, second, third);
  }

  /** Everything about one job, with its closed runs and what it saved. @throws UnknownJobError */
  get<H extends HandlerClass = HandlerClass>(id: JobId): Promise<JobStatus<PayloadOf<H>, ResultOf<H>>> {
    return this.reader.get<H>(id);
  }

  /** A page of jobs, newest first. @throws InvalidJobError naming the filter that is wrong */
  find(filter: FindJobs = {}): Promise<JobPage> {
    return this.reader.find(filter);
  }

  /** How many jobs are in each state. Counts rows: for a dashboard, not for every request. */
  counts(): Promise<Record<JobState, number>> {
    return this.reader.counts();
  }

  /** Kinds with jobs ready that no active worker handles (R27). */
  unhandledKinds(): Promise<string[]> {
    return this.reader.unhandledKinds();
  }

  /**
   * Waits until the job has finished, and returns it then.
   * @throws WaitTimeoutError after `timeout` (30 s); the job goes on. UnknownJobError
   */
  waitFor<H extends HandlerClass = HandlerClass>(
    id: JobId,
    options: WaitOptions = {},
  ): Promise<JobStatus<PayloadOf<H>, ResultOf<H>>> {
    return this.waiter.waitFor(id, options) as Promise<JobStatus<PayloadOf<H>, ResultOf<H>>>;
  }

  /**
   * Cancels a job that has not started at once. For a running one it is a request (`requested`): its handler's signal aborts, and when that ends
   * with an error, or its worker is lost, the job is cancelled; a success that comes first wins, and says so in its `reason`. `waitFor` tells.
   * @throws IllegalTransitionError if it has completed or failed; UnknownJobError; JobContendedError
   */
  cancel(id: JobId, options: SteerOptions = {}): Promise<Steered> {
    return this.steering.one('cancel', id, options);
  }

  /** Cancels it now, whatever its handler does: the lease is taken away, and whatever its holder still writes is refused. */
  forceCancel(id: JobId, options: SteerOptions = {}): Promise<Steered> {
    return this.steering.one('forceCancel', id, options);
  }

  /** Sets it aside until `resume`. A running one is asked to stop at its next boundary; it keeps its checkpoint and spends no attempt. */
  pause(id: JobId): Promise<Steered> {
    return this.steering.one('pause', id);
  }

  /** A paused job goes on waiting for its time or its key, or becomes ready; a pause that a running one has not followed yet is withdrawn. */
  resume(id: JobId): Promise<Steered> {
    return this.steering.one('resume', id);
  }

  /**
   * Runs a finished job again, with fresh budgets, from its last checkpoint; its outcome so far goes into its `runs`.
   * @throws IllegalTransitionError unless it has finished, or if another job holds its key by now
   */
  retry(id: JobId): Promise<Steered> {
    return this.steering.one('retry', id);
  }

  /** Starts a scheduled job as soon as a slot is free. */
  runNow(id: JobId): Promise<Steered> {
    return this.steering.one('runNow', id);
  }

  /** Gives a job that has not finished another priority (lower runs first); to a running one for its next run. */
  reprioritise(id: JobId, priority: number): Promise<Steered> {
    return this.steering.one('reprioritise', id, { priority });
  }

  /** Removes a job that does not run, with its result, runs and checkpoint. @throws IllegalTransitionError while it runs */
  delete(id: JobId): Promise<Steered> {
    return this.steering.one('delete', id);
  }

  /**
   * One command for every job that fits the filter and that it is possible for, the oldest first, at most `limit` (1000) of them. Each
   * is done for itself. `countFor` says beforehand how many there are.
   */
  steerMany(command: JobCommand, filter: JobFilter, options: SteerManyOptions = {}): Promise<SteerSummary> {
    return this.steering.many(command, filter, options);
  }

  /** How many jobs `steerMany` would change, counted to 10 000. */
  countFor(command: JobCommand, filter: JobFilter): Promise<number> {
    return this.steering.preview(command, filter);
  }
}
