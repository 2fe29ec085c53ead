import type { LeaseEvent } from '@leasehold/nestjs';

/** How a worker process is told what to do, in the environment variable {@link CONFIG}. */
export interface WorkerConfig {
  url: string;
  schema: string;
  /** Name in the registry. */
  name: string;
  paceMs: number;
}

export const CONFIG = 'LEASEHOLD_DEMO_WORKER';

export type FromWorker =
  /** It is registered and claims. */
  { type: 'ready' } | { type: 'events'; events: LeaseEvent[] };

export interface ToWorker {
  type: 'pace';
  ms: number;
}
