import { addingCases } from './adding';
import { backlogCases } from './backlog';
import { batchCases } from './batches';
import { beatCases } from './beat';
import type { BenchCase } from './bench-case';
import { drainingCases } from './draining';
import { headCases } from './head';
import { latencyCases } from './latency';
import { memoryCases } from './memory';
import { recoveryCases } from './recovery';
import { snapshotCases } from './snapshot';

/** Everything that is measured, in the order of a round. */
export const CASES: readonly BenchCase[] = [
  ...addingCases,
  ...drainingCases,
  ...latencyCases,
  ...backlogCases,
  ...batchCases,
  ...headCases,
  ...snapshotCases,
  ...beatCases,
  ...recoveryCases,
  ...memoryCases,
];

export type { BenchCase } from './bench-case';
