import { Client } from 'pg';

/** Creates a database unless it exists; a standby cannot, it has what its primary has. */
export async function ensureDatabase(port: number, name: string): Promise<void> {
  const client = new Client({ host: '127.0.0.1', port, user: 'postgres', database: 'postgres', ssl: false });
  client.on('error', () => undefined);
  await client.connect();
  try {
    const { rows } = await client.query<{ create: boolean }>(
      `SELECT NOT pg_is_in_recovery() AND NOT EXISTS (SELECT FROM pg_database WHERE datname = $1) AS create`,
      [name],
    );
    if (rows[0]?.create === true) await client.query(`CREATE DATABASE ${client.escapeIdentifier(name)}`);
  } finally {
    await client.end();
  }
}

export function urlOf(port: number, database: string): string {
  return `postgres://postgres@127.0.0.1:${port}/${encodeURIComponent(database)}`;
}
