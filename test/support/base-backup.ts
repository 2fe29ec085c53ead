import { copyFile, mkdir, readdir, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import type { EmbeddedPostgres } from '@leasehold/embedded-postgres';
import { onServer } from './on-server';

// Belong to the running server, or come by streaming. The folders themselves must exist.
const LEFT_FILES = new Set(['postmaster.pid', 'postmaster.opts', 'pg_internal.init']);
const EMPTY_FOLDERS = new Set(['pg_wal', 'pg_replslot', 'pg_stat_tmp', 'pg_notify', 'pg_dynshmem', 'pgsql_tmp']);

/**
 * A copy of a running server's data that starts as its standby.
 * By https://www.postgresql.org/docs/18/continuous-archiving.html#BACKUP-LOWLEVEL-BASE-BACKUP
 */
export async function copyOfPrimary(primary: EmbeddedPostgres, target: string): Promise<void> {
  await onServer(primary.url, async (client) => {
    await client.query(`SELECT pg_backup_start('standby', true)`);
    await copyFolder(primary.dataDir, target);
    const { rows } = await client.query<{ labelfile: string }>('SELECT labelfile FROM pg_backup_stop(false)');
    await writeFile(join(target, 'backup_label'), rows[0]?.labelfile ?? '');
    await writeFile(join(target, 'standby.signal'), '');
  });
}

async function copyFolder(source: string, target: string): Promise<void> {
  await mkdir(target, { recursive: true });
  for (const entry of await readdir(source, { withFileTypes: true })) {
    const [from, to] = [join(source, entry.name), join(target, entry.name)];
    if (entry.isDirectory()) {
      if (EMPTY_FOLDERS.has(entry.name)) await mkdir(to);
      else await copyFolder(from, to);
    } else if (!LEFT_FILES.has(entry.name)) {
      await copyFile(from, to).catch(ignoreVanished);
    }
  }
}

/** Files come and go while the server runs; the log tells the standby about it. */
function ignoreVanished(error: NodeJS.ErrnoException): void {
  if (error.code !== 'ENOENT') throw error;
}
