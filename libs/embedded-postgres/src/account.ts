import { execFile } from 'node:child_process';
import { EmbeddedPostgresError } from './errors';

/** A system account by its numbers. */
export interface Account {
  uid: number;
  gid: number;
}

const CANDIDATES = ['postgres', 'nobody'];

export function isRoot(): boolean {
  return process.getuid?.() === 0;
}

/** PostgreSQL refuses to run as root: root uses an account that exists (none is created), anybody else stays as they are. */
export async function unprivilegedAccount(): Promise<Account | undefined> {
  if (!isRoot()) return undefined;
  for (const name of CANDIDATES) {
    const [uid, gid] = await Promise.all([idOf('-u', name), idOf('-g', name)]);
    if (uid !== undefined && gid !== undefined && uid !== 0) return { uid, gid };
  }
  throw new EmbeddedPostgresError(
    'NO_UNPRIVILEGED_ACCOUNT',
    `PostgreSQL refuses to run as root, and there is no account named ${CANDIDATES.join(' or ')} to run it: ` +
      'start as another user, or set DATABASE_URL to a PostgreSQL 14 or later.',
  );
}

function idOf(flag: string, name: string): Promise<number | undefined> {
  return new Promise((resolve) => {
    execFile('id', [flag, name], (error, stdout) => resolve(error === null ? Number(stdout) : undefined));
  });
}
