import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { Account } from './account';
import { EmbeddedPostgresError } from './errors';
import { giveTo } from './ownership';
import { canUse } from './reach';

/**
 * A temporary folder for the log, for copied binaries and for data that is not kept. It belongs to the account that
 * runs the server and is private to it. The system's temporary folder may be private to root: then the usual ones.
 */
export async function createWorkFolder(account: Account | undefined): Promise<string> {
  for (const parent of new Set([tmpdir(), '/tmp', '/var/tmp'])) {
    const folder = tryCreate(parent);
    if (folder === undefined) continue;
    giveTo(folder, account);
    if (account === undefined || (await canUse(folder, account))) return folder;
    rmSync(folder, { recursive: true, force: true });
  }
  throw new EmbeddedPostgresError(
    'BINARIES_UNUSABLE',
    `No temporary folder is open to the account that runs PostgreSQL (tried ${tmpdir()}, /tmp, /var/tmp): ` +
      'set TMPDIR to one that is, or DATABASE_URL to a PostgreSQL 14 or later.',
  );
}

function tryCreate(parent: string): string | undefined {
  try {
    return mkdtempSync(join(parent, 'leasehold-pg-'));
  } catch {
    return undefined;
  }
}
