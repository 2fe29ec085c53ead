import { Client } from 'pg';
import { InvalidOptionError, SchemaError } from '../errors';
import type { ResolvedOptions } from '../options/lease-options';
import { type ConnectionTargets, endClient, limitedQuery, ownTypes } from './connection';
import { Logger } from '@nestjs/common';

const MIN_VERSION = 140_000;

/**
 * What must be known before the first job: the server's version, and whether our connections fit under its limit. The check
 * uses a connection of its own that ends with it.
 */
export async function assertServerFits(targets: ConnectionTargets, options: ResolvedOptions): Promise<void> {
  const client = new Client({
    connectionTimeoutMillis: options.connection.queryTimeoutMs,
    ...targets.direct,
    types: ownTypes,
  });
  client.on('error', () => undefined);
  try {
    await client.connect();
    const [row] = await limitedQuery<{ version: number; limit: number; used: number }>(
      client,
      {
        text: `SELECT current_setting('server_version_num')::int AS version,
          current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int AS limit,
          (SELECT count(*)::int FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()) AS used`,
      },
      options.connection.queryTimeoutMs,
    );
    if (!row) return;
    if (row.version < MIN_VERSION) {
      throw new SchemaError(`PostgreSQL 14 or later is needed; the server says ${row.version}`);
    }
    const needed = options.role === 'producer' ? options.connection.poolMax : options.connection.poolMax + 2;
    if (needed > row.limit) {
      throw new InvalidOptionError(
        `connection.poolMax = ${options.connection.poolMax} needs ${needed} connections (the pool's, the beat's and the leader's), ` +
          `and the server allows ${row.limit} in all: lower connection.poolMax or raise the server's max_connections`,
      );
    }
    if (needed > row.limit - row.used) {
      new Logger('Leasehold').warn(
        `This process may open ${needed} connections, and the server has ${row.limit - row.used} of ${row.limit} left: ` +
          'lower connection.poolMax or raise max_connections',
      );
    }
  } finally {
    await endClient(client);
  }
}
