import { chmodSync, mkdirSync, readdirSync, readFileSync, realpathSync, rmSync, statSync } from 'node:fs';
import { join, resolve } from 'node:path';
import type { Account } from './account';
import { EmbeddedPostgresError, textOf } from './errors';
import { giveTo } from './ownership';
import { canUse } from './reach';

/** A folder for data, private and owned by the account that runs the server. */
export interface DataFolder {
  path: string;
  /** Who runs the server on it. */
  account: Account | undefined;
  /** Major version of the data in it; undefined when it is empty. */
  version: string | undefined;
}

/** A data folder inside the work folder. */
export function temporaryDataFolder(workFolder: string, account: Account | undefined): DataFolder {
  const wanted = join(workFolder, 'data');
  createFolder(wanted, account);
  const path = realpathSync(wanted);
  return { path, account, version: undefined };
}

/**
 * Opens a folder that keeps its data, or makes it. Run by root, data of another account is served as that account, so
 * that both can go on using it, and data of root is given to the unprivileged account; anybody else needs their own.
 */
export async function keptDataFolder(wanted: string, unprivileged: Account | undefined): Promise<DataFolder> {
  const created = createFolder(resolve(wanted), unprivileged);
  const path = realpathSync(wanted);
  const owner = ownerOf(path);
  const version = versionOf(path);
  const account = unprivileged === undefined || owner.uid === 0 ? unprivileged : owner;
  if (owner.uid === 0) giveTo(path, account);
  if (!(await canUse(path, account))) {
    if (created !== undefined) rmSync(created, { recursive: true });
    throw new EmbeddedPostgresError(
      'DATA_DIR_UNREACHABLE',
      `The account that runs PostgreSQL${account ? ` (uid ${account.uid}, as root may not)` : ''} cannot write in ` +
        `${path}: choose a folder whose parents it may enter, or start as the account that owns it.`,
    );
  }
  // PostgreSQL refuses data that others may read; copies and volumes often arrive that way.
  chmodSync(path, 0o700);
  return { path, account, version };
}

/** Refuses data that the installed binaries cannot read. */
export function assertVersion(folder: DataFolder, majorVersion: string): void {
  if (folder.version === undefined || folder.version === majorVersion) return;
  throw new EmbeddedPostgresError(
    'DATA_DIR_VERSION',
    `The data in ${folder.path} is of PostgreSQL ${folder.version}, the embedded server is ${majorVersion}: ` +
      `dump it with a PostgreSQL ${folder.version} and restore it into another folder, or remove it.`,
  );
}

/** Returns the first folder that had to be made; undefined when the path exists. */
function createFolder(path: string, account: Account | undefined): string | undefined {
  try {
    const created = mkdirSync(path, { recursive: true, mode: 0o700 });
    if (created !== undefined) giveTo(created, account);
    return created;
  } catch (cause) {
    throw new EmbeddedPostgresError(
      'DATA_DIR_UNREACHABLE',
      `The data folder ${path} cannot be made or entered (${textOf(cause)}): choose another.`,
      { cause },
    );
  }
}

/** Whose folder it is. Only root may serve the data of another account. */
function ownerOf(path: string): Account {
  const { uid, gid } = statSync(path);
  const own = process.getuid?.();
  if (own === 0 || own === uid) return { uid, gid };
  throw new EmbeddedPostgresError(
    'DATA_DIR_OWNER',
    `${path} belongs to another account (uid ${uid}): start as that account, give the folder away ` +
      `(chown -R ${own} ${path}), or use another folder.`,
  );
}

function versionOf(path: string): string | undefined {
  const names = readdirSync(path);
  if (names.includes('PG_VERSION')) return readFileSync(join(path, 'PG_VERSION'), 'utf8').trim();
  if (names.length === 0) return undefined;
  throw new EmbeddedPostgresError(
    'DATA_DIR_NOT_EMPTY',
    `${path} holds files that are no PostgreSQL data: use an empty folder, or one that does not exist yet.`,
  );
}
