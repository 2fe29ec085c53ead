import { Injectable, Logger } from '@nestjs/common';
import { LeaseEvents } from '../events/lease-events';
import { JobReader } from '../jobs/job-reader';
import { errorText } from '../storage/sql-errors';
import { HandlerRegistry } from './handler-registry';

/** Calls a handler's `onFailed` when this process has recorded that a job of its kind failed for good. */
@Injectable()
export class FinalFailures {
  private readonly logger = new Logger('Leasehold');

  constructor(
    private readonly registry: HandlerRegistry,
    private readonly reader: JobReader,
    events: LeaseEvents,
  ) {
    events.on('job.finally-failed', ({ jobId, kind }) => void this.tell(jobId, kind));
  }

  private async tell(jobId: string, kind: string): Promise<void> {
    const definition = this.registry.get(kind);
    if (typeof (definition?.type.prototype as { onFailed?: unknown } | undefined)?.onFailed !== 'function') return;
    try {
      const handler = definition?.singleton ?? (await definition?.instance());
      await handler?.onFailed?.(await this.reader.get(jobId));
    } catch (error) {
      this.logger.error(`onFailed of job ${jobId} (${kind}): ${errorText(error)}`);
    }
  }
}
