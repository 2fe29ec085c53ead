import { Injectable } from '@nestjs/common';
import { EmptyBatchError } from '../errors';
import type { SteerOptions } from '../jobs/job-steering';
import type { Duration } from '../options/duration';
import { BatchBuilder } from './batch-builder';
import type {
  AddOptions,
  AddedMembers,
  BatchId,
  BatchInfo,
  BatchMember,
  BatchOptions,
  BatchPage,
  BatchStatus,
  CreatedBatch,
  FindBatches,
  MemberResult,
  SealOptions,
} from './batch.types';
import { BatchReader } from './batch-reader';
import { BatchSweep } from './batch-sweep';
import { BatchSteering, type BatchSteered } from './batch-steering';
import { BatchWriter } from './batch-writer';

/** Jobs that belong together, with one aggregated status that is never wrong (R28 to R31). */
@Injectable()
export class BatchesService {
  constructor(
    private readonly writer: BatchWriter,
    private readonly reader: BatchReader,
    private readonly steering: BatchSteering,
    private readonly sweep: BatchSweep,
  ) {}

  /** What this process, as the leader, has found that a crash had left, and repaired: batches not ended, edges not followed (F:K1). Zero, but for crashes. */
  get repaired(): number {
    return this.sweep.repaired;
  }

  /**
   * Creates a batch with up to 200 000 members at once, all or nothing, in the caller's transaction if one is given. Members without `dependsOn` may start at the
   * commit; the others when all that they depend on have completed. Without `open` the batch is sealed: it ends when its members have.
   * A reply that was lost is no uncertainty: the call finds what it has made.
   * @throws InvalidBatchError naming the members: a name given twice, an unknown or own dependency, a circle, no members
   */
  create(name: string, members: readonly BatchMember[], options: BatchOptions = {}): Promise<CreatedBatch> {
    return this.writer.create(name, members, options);
  }

  /** The usual shapes, put together: fan-out, chain, map and reduce. */
  build(name: string): BatchBuilder {
    return new BatchBuilder(name, (...given) => this.create(...given));
  }

  /**
   * Adds members to an open batch; they may depend on those that are there. A name that is there already is left as it is, so a fan-out that broke off half-way
   * can be repeated (F:K6), whatever has become of the batch; from inside a member or any other job, `{ under: lease }` adds them only if its lease is still held.
   * In the caller's transaction, this needs READ COMMITTED. After a lost reply, members that all have names are given again (and may then be `existing`).
   * @throws IllegalBatchStateError if it is sealed, being cancelled or ended; EnqueueUncertainError when the reply was lost and a member has no name;
   * LeaseLostError; InvalidBatchError; UnknownBatchError
   */
  add(id: BatchId, members: readonly BatchMember[], options: AddOptions = {}): Promise<AddedMembers> {
    return this.writer.add(id, members, options);
  }

  /**
   * No more members: it ends when those that are there have ended, which may be now. Sealing twice is no error. In the caller's transaction, this needs READ COMMITTED.
   * @returns its status
   * @throws EmptyBatchError unless `ifEmpty: 'complete'`; LeaseLostError; UnknownBatchError
   */
  seal(id: BatchId, options: SealOptions = {}): Promise<BatchStatus> {
    return this.writer.seal(id, options);
  }

  /** Status, counts by state, share done, estimated end: one indexed read. @throws UnknownBatchError */
  get(id: BatchId): Promise<BatchInfo> {
    return this.reader.get(id);
  }

  /** The status alone. @throws EmptyBatchError if it has no members and none is what it was sealed with; UnknownBatchError */
  async status(id: BatchId): Promise<Exclude<BatchStatus, 'untouched'>> {
    const { status } = await this.reader.get(id);
    if (status === 'untouched') throw new EmptyBatchError(id);
    return status;
  }

  /** A page of batches, newest first. */
  find(filter: FindBatches = {}): Promise<BatchPage> {
    return this.reader.find(filter);
  }

  /** What became of the members that have ended, in the order of their ids, read from the database page by page: never all in memory. */
  results<R = unknown>(id: BatchId): AsyncGenerator<MemberResult<R>, void, undefined> {
    return this.reader.results<R>(id);
  }

  /** Waits until it has ended. @throws WaitTimeoutError after `timeout` (30 s); it goes on. UnknownBatchError */
  waitFor(id: BatchId, { timeout }: { timeout?: Duration } = {}): Promise<BatchInfo> {
    return this.reader.waitFor(id, timeout);
  }

  /** Cancels everything of it that is unfinished; running members are asked to stop. Nothing can be added any more: it ends when they have. */
  cancel(id: BatchId, options: SteerOptions = {}): Promise<BatchSteered> {
    return this.steering.cancel(id, options);
  }

  /** Pauses everything that is unfinished. Members that are added later are not paused. */
  pause(id: BatchId): Promise<BatchSteered> {
    return this.steering.steer('pause', id);
  }

  /** Members go on waiting for their time or for others, or become ready. */
  resume(id: BatchId): Promise<BatchSteered> {
    return this.steering.steer('resume', id);
  }

  /**
   * Runs the failed members again, and those that failed or were cancelled since another had failed; a batch that had ended begins its next generation. Of one that
   * is being cancelled: none, they are `skipped`.
   */
  retryFailed(id: BatchId): Promise<BatchSteered> {
    return this.steering.retryFailed(id);
  }

  /** Deletes it with all its members. @returns how many members it had. @throws IllegalBatchStateError before it has ended */
  delete(id: BatchId): Promise<number> {
    return this.steering.delete(id);
  }
}
