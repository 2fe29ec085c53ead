import { type EmbeddedPostgres, startEmbeddedPostgres } from '@leasehold/embedded-postgres';

/** The same for all who keep their jobs in PostgreSQL. Durable: fsync, full_page_writes and synchronous_commit are on. */
export const POSTGRES_SETTINGS = {
  fsync: 'on',
  full_page_writes: 'on',
  synchronous_commit: 'on',
  shared_buffers: '1GB',
  // So that a checkpoint falls between the runs (one is made before each) and not by chance into somebody's.
  max_wal_size: '8GB',
  checkpoint_timeout: '30min',
  // graphile-worker may have a connection for each of its jobs, in four processes.
  max_connections: '600',
};

/** A server of the benchmark's own in a temporary folder, which goes when this process does. */
export function startPostgres(): Promise<EmbeddedPostgres> {
  return startEmbeddedPostgres({ database: 'bench', durable: true, settings: POSTGRES_SETTINGS });
}
