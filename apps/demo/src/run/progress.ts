import { setTimeout as sleep } from 'node:timers/promises';
import type { BatchId, BatchesService, JobState, JobsService } from '@leasehold/nestjs';
import { DemoError } from '../errors';
import type { Timeline } from '../output/timeline';
import { until } from './until';

const LOOK_MS = 200;
/** Longer than any pause that the faults cause. */
const STALLED_MS = 90_000;

/** Follows the batch of all documents in the database, which a killed worker cannot falsify as it could a count of messages. */
export class Progress {
  finished = 0;

  constructor(
    private readonly jobs: JobsService,
    private readonly batches: BatchesService,
    private readonly batch: BatchId,
    private readonly total: number,
    private readonly timeline: Timeline,
  ) {}

  get done(): boolean {
    return this.finished >= this.total;
  }

  /** Resolves when every document's job has ended. @throws when nothing has ended for too long */
  async untilDone(signal: AbortSignal): Promise<void> {
    let changedAt = performance.now();
    while (!this.done) {
      await sleep(LOOK_MS, undefined, { signal });
      const before = this.finished;
      const counts = await this.look();
      if (this.finished > before) changedAt = performance.now();
      else if (performance.now() - changedAt > STALLED_MS) {
        throw new DemoError(`No job has ended for ${STALLED_MS / 1000} s: ${JSON.stringify(counts)}`);
      }
    }
  }

  /** When the batch has ended and the job that closes it too. @returns that job's id */
  async untilClosed(signal: AbortSignal): Promise<string> {
    const { id } = await until(
      'The closing job',
      async () => {
        const [job] = (await this.jobs.find({ kind: 'document.close-index' })).jobs;
        return job?.finishedAt != null && job;
      },
      { signal },
    );
    return id;
  }

  /** Jobs that no worker has yet. */
  async queued(): Promise<number> {
    return (await this.look()).ready;
  }

  private async look(): Promise<Record<JobState, number>> {
    const { counts } = await this.batches.get(this.batch);
    this.finished = counts.completed + counts.failed + counts.cancelled;
    this.timeline.progress(this.finished, this.total, counts.running, counts.failed);
    return counts;
  }
}
