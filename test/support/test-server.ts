import type { PostgreSqlContainer as Container } from '@testcontainers/postgresql';
import { startEmbeddedPostgres } from '@leasehold/embedded-postgres';
import { errorText } from './error-text';

/** The PostgreSQL server that a run of the tests uses. */
export interface TestServer {
  kind: 'DATABASE_URL' | 'testcontainers' | 'embedded';
  /** Why this one. */
  reason: string;
  /** Url of a role that may create databases. */
  url: string;
  stop: () => Promise<void>;
}

const CHOICES = ['url', 'testcontainers', 'embedded'];
const IMAGE = 'postgres:18-alpine';

/** `DATABASE_URL`, else Docker, else the embedded server; `LEASE_TEST_PG` forces one. */
export async function pickTestServer(env: NodeJS.ProcessEnv = process.env): Promise<TestServer> {
  const { DATABASE_URL: url, LEASE_TEST_PG: forced } = env;
  if (forced !== undefined && !CHOICES.includes(forced)) {
    throw new Error(`LEASE_TEST_PG=${forced} is none of ${CHOICES.join(', ')}`);
  }
  if (forced === 'url' && !url) throw new Error('LEASE_TEST_PG=url needs DATABASE_URL');
  if (forced === 'embedded') return embedded('LEASE_TEST_PG asks for it');
  if (forced === 'testcontainers') return container('LEASE_TEST_PG asks for it');
  if (url) return { kind: 'DATABASE_URL', reason: 'it is set', url, stop: () => Promise.resolve() };
  try {
    return await container('Docker works and DATABASE_URL is not set');
  } catch (error) {
    return embedded(`DATABASE_URL is not set, and Docker: ${errorText(error)}`);
  }
}

async function container(reason: string): Promise<TestServer> {
  const started = await new (loadContainers())(IMAGE).withCommand(['postgres', '-c', 'max_connections=200']).start();
  return {
    kind: 'testcontainers',
    reason,
    url: started.getConnectionUri(),
    stop: async () => void (await started.stop()),
  };
}

/** Loading it takes most of a second, so only a run that tries Docker pays. */
function loadContainers(): typeof Container {
  // eslint-disable-next-line @typescript-eslint/no-require-imports
  return (require('@testcontainers/postgresql') as { PostgreSqlContainer: typeof Container }).PostgreSqlContainer;
}

async function embedded(reason: string): Promise<TestServer> {
  const { url, stop } = await startEmbedded();
  return { kind: 'embedded', reason, url, stop };
}

async function startEmbedded(): Promise<{ url: string; stop: () => Promise<void> }> {
  const server = await startEmbeddedPostgres({ database: 'postgres' });
  return { url: server.url, stop: () => server.stop() };
}
