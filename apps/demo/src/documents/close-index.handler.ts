import { type BatchEnd, BatchesService, type Handler, type Job, JobHandler } from '@leasehold/nestjs';
import type { DocumentIndex } from './index-document';

/** What the folder comes to, by the job that closed its batch. */
export interface IndexTotals {
  batch: BatchEnd;
  indexed: number;
  words: number;
  brokenLinks: number;
}

/**
 * Runs once, when every document's job has ended: enqueued by whichever process found that nothing of the batch was unfinished, in the transaction that
 * ended it. Reads the results page by page; none of them is held.
 */
@JobHandler('document.close-index', { queue: 'index', maxCrashes: 6 })
export class CloseIndex implements Handler<{ batch: BatchEnd }, IndexTotals> {
  constructor(private readonly batches: BatchesService) {}

  async handle({ payload: { batch } }: Job<{ batch: BatchEnd }>): Promise<IndexTotals> {
    const totals: IndexTotals = { batch, indexed: 0, words: 0, brokenLinks: 0 };
    for await (const { result } of this.batches.results<DocumentIndex>(batch.id)) {
      if (!result) continue;
      totals.indexed++;
      totals.words += result.words;
      totals.brokenLinks += result.links.brokenCount;
    }
    return totals;
  }
}
