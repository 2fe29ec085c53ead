import { Client } from 'pg';

const CONNECT_DEADLINE_MS = 5_000;

/** Does something in a session of its own, and ends it. */
export async function onServer<T>(url: string, work: (client: Client) => Promise<T>): Promise<T> {
  const client = new Client({
    connectionString: url,
    application_name: 'lh_test_admin',
    connectionTimeoutMillis: CONNECT_DEADLINE_MS,
  });
  client.on('error', () => undefined);
  await client.connect();
  try {
    return await work(client);
  } finally {
    await client.end();
  }
}
