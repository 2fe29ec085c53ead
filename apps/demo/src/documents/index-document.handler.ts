import { type Handler, type Job, JobHandler } from '@leasehold/nestjs';
import { Pace } from '../worker/pace';
import { type DocumentIndex, indexDocument } from './index-document';
import { IndexDocumentDto } from './index-document.dto';

export const CONCURRENCY = 8;

/**
 * Indexes one file.
 *
 * It never looks at `lease.signal`, as a well-behaved handler would: so that after a freeze it goes on, believing in its lease, and it
 * is the fence that stops it. More crashes are allowed than by default because the demo causes two of them on purpose.
 */
@JobHandler('document.index', {
  queue: 'index',
  concurrency: CONCURRENCY,
  deadline: '2m',
  maxAttempts: 3,
  maxCrashes: 6,
  payload: IndexDocumentDto,
})
export class IndexDocument implements Handler<IndexDocumentDto, DocumentIndex> {
  constructor(private readonly pace: Pace) {}

  async handle({ payload }: Job<IndexDocumentDto>): Promise<DocumentIndex> {
    const index = await indexDocument(payload.root, payload.path);
    await this.pace.wait();
    return index;
  }
}
