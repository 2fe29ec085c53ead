import type { BatchInfo } from '@leasehold/nestjs';
import type { IndexTotals } from '../documents/close-index.handler';
import type { Findings } from '../output/findings';
import type { Check } from './verify';

/** Whether the batch has the one status that its jobs' rows add up to, and its closing job saw all that the report finds. */
export function checkBatch(
  { status, counts, members, generation }: BatchInfo,
  closing: IndexTotals | null,
  found: Findings,
): Check {
  const expected = counts.failed > 0 ? 'failed' : 'completed';
  const { batch, ...totals } = closing ?? { batch: undefined };
  const read = JSON.stringify(totals);
  const rows = JSON.stringify({
    indexed: counts.completed,
    words: found.totals.words,
    brokenLinks: found.totals.brokenLinks,
  });
  const ok =
    status === expected &&
    generation === 1 &&
    batch?.status === status &&
    batch.completed === counts.completed &&
    batch.failed === counts.failed &&
    read === rows;
  return {
    ok,
    text: ok
      ? `the batch ended once, as ${status}, and its closing job saw all ${members} members`
      : `the batch is ${status} with ${JSON.stringify(counts)}; its closing job was told ${JSON.stringify(batch)} and read ${read} instead of ${rows}`,
  };
}
