import type { Duration, LeaseOptions } from '@leasehold/nestjs';

export const TTL_MS = 3000;
export const SCAN_MS = 500;

/** Short times, so that many faults fit into a run; the ratios are those of the defaults. */
export const SETTINGS: Partial<LeaseOptions> = {
  lease: { ttl: TTL_MS, beat: '500ms' },
  rescue: { every: SCAN_MS, sessionEvery: '250ms', sessionGrace: '500ms' },
  leader: { probe: '500ms', retry: '100ms' },
  poll: '250ms',
  shutdown: { timeout: '2s', grace: '1s' },
};

/** Of one query; without it a line that has gone silent would keep what was sent for ten seconds, three TTLs here. */
export const QUERY_TIMEOUT: Duration = '1500ms';

/** Connections of a worker by what they are for, as they call themselves. */
export const ROLES = { pool: /^leasehold$/, beat: /^lh:/, main: /^leasehold main$/, effect: /^chaos effect$/ } as const;

export type Role = keyof typeof ROLES;
