import { onServer } from './on-server';
import { runState } from './run-state';
import { databasePrefix, describeSessions, LEFT_SESSIONS, type Session } from './test-database';

/** Drops what the specs left, stops the server, and fails the run when a session of ours was still there. */
export default async function globalTeardown(): Promise<void> {
  const state = runState();
  const { server } = state;
  if (server === undefined) return;
  try {
    const left = await cleanUp(server.url);
    if (left !== '') throw new Error(`Sessions were left behind:\n${left}`);
  } catch (error) {
    state.teardownFailed = true;
    throw error;
  } finally {
    await server.stop();
  }
}

function cleanUp(url: string): Promise<string> {
  return onServer(url, async (client) => {
    const { rows: databases } = await client.query<{ datname: string }>(
      'SELECT datname FROM pg_database WHERE starts_with(datname, $1)',
      [databasePrefix()],
    );
    const names = databases.map(({ datname }) => datname);
    const { rows: sessions } = await client.query<Session>(LEFT_SESSIONS, [names]);
    if (process.env.LEASE_KEEP_DB !== '1') {
      for (const name of names) await client.query(`DROP DATABASE ${client.escapeIdentifier(name)} WITH (FORCE)`);
    }
    return describeSessions(sessions);
  });
}
