import { CONCURRENCY } from '../documents/index-document.handler';

/** Until both faults have landed, noticed and all. */
const FAULTS_TAKE_MS = 16_000;
/** Any number of files will do with this: once the faults are over, nothing is held up any more. */
const SHORTEST_MS = 150;
/** Long enough for a single job to be killed under way. */
const LONGEST_MS = 3000;

/** How long each job is held up so that there are jobs in flight for both faults; the fewer the files, the longer. */
export function paceFor(files: number, workers: number): number {
  const wanted = (FAULTS_TAKE_MS * workers * CONCURRENCY) / files;
  return Math.round(Math.min(LONGEST_MS, Math.max(SHORTEST_MS, wanted)));
}
