import type { LeaseOptions } from '@leasehold/nestjs';

export const TTL_MS = 5000;

/**
 * Shorter than the defaults (30 s, 10 s, 5 s, 1 s and 2 s), so that a freeze is noticed while one watches. The ratios are the same.
 */
export const LEASE_SETTINGS = {
  lease: { ttl: TTL_MS, beat: '1s' },
  rescue: { every: '1s', sessionEvery: '500ms', sessionGrace: '1s' },
  leader: { probe: '1s', retry: '500ms' },
} satisfies Partial<LeaseOptions>;
