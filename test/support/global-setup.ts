import { randomBytes } from 'node:crypto';
import { runState } from './run-state';
import { pickTestServer } from './test-server';

/** Starts or finds the server, and hands it to the specs in `LEASE_TEST_URL`. */
export default async function globalSetup(): Promise<void> {
  const began = Date.now();
  const server = await pickTestServer();
  runState().server = server;
  process.env.LEASE_TEST_URL = server.url;
  // Part of every database's name, so that two runs on one server leave each other alone.
  process.env.LEASE_TEST_RUN = randomBytes(2).toString('hex');
  process.stderr.write(
    `\nPostgreSQL for the tests: ${server.kind}, because ${server.reason} (${Date.now() - began} ms)\n`,
  );
}
