import { randomBytes } from 'node:crypto';
import {
  startEmbeddedPostgres,
  type EmbeddedPostgres,
  type EmbeddedPostgresOptions,
} from '@leasehold/embedded-postgres';
import { copyOfPrimary } from './base-backup';
import { eventually } from './eventually';
import { onServer } from './on-server';

const running = new Set<EmbeddedPostgres>();

/** A server of the spec's own, to restart, crash or promote; stopped after the spec. */
export async function startServer(options: EmbeddedPostgresOptions = {}): Promise<EmbeddedPostgres> {
  const server = await startEmbeddedPostgres({ database: 'postgres', ...options });
  running.add(server);
  return server;
}

/**
 * A streaming standby of a server, read-only until {@link promote}. The binaries come without pg_basebackup: the copy
 * is made by the functions that it uses itself. The slot keeps the log that the standby has not read.
 */
export async function startStandby(
  primary: EmbeddedPostgres,
  options: EmbeddedPostgresOptions = {},
): Promise<EmbeddedPostgres> {
  const name = `standby_${randomBytes(3).toString('hex')}`;
  const conninfo = `host=127.0.0.1 port=${primary.port} user=postgres application_name=${name}`;
  await onServer(primary.url, (client) => client.query('SELECT pg_create_physical_replication_slot($1, true)', [name]));
  return startServer({
    ...options,
    settings: { primary_conninfo: conninfo, primary_slot_name: name, ...options.settings },
    populate: (dataDir) => copyOfPrimary(primary, dataDir),
  });
}

/** Makes a standby the primary; resolves when it takes writes. The former primary goes on, as in a split brain. */
export async function promote(standby: EmbeddedPostgres): Promise<void> {
  await onServer(standby.url, (client) => client.query('SELECT pg_promote(true, 60)'));
}

/** Resolves when the standby has replayed all that the primary has written so far. */
export async function caughtUp(primary: EmbeddedPostgres, standby: EmbeddedPostgres): Promise<void> {
  const { rows } = await onServer(primary.url, (client) =>
    client.query<{ lsn: string }>('SELECT pg_current_wal_lsn() AS lsn'),
  );
  await eventually(
    () =>
      onServer(standby.url, async (client) => {
        const sql = 'SELECT pg_last_wal_replay_lsn() >= $1::pg_lsn AS done';
        const answer = await client.query<{ done: boolean }>(sql, [rows[0]?.lsn]);
        return answer.rows[0]?.done;
      }),
    { what: 'Catching up of the standby' },
  );
}

/** Stops every server that was started here. */
export async function stopServers(): Promise<void> {
  const servers = [...running];
  running.clear();
  await Promise.all(servers.map((server) => server.stop()));
}

afterAll(stopServers);
