import type { EmbeddedPostgres } from '@leasehold/embedded-postgres';
import type { Fleet } from '../fleet';
import type { Ledger } from '../ledger';
import type { Random } from '../random';

/** What a fault may work on. */
export interface Stage {
  fleet: Fleet;
  postgres: EmbeddedPostgres;
  ledger: Ledger;
  random: Random;
  signal: AbortSignal;
}

/** One kind of trouble. Resolves when it is over, with what it was done to; undefined: there was nothing to do it to. */
export type Fault = (stage: Stage) => Promise<string | undefined>;
