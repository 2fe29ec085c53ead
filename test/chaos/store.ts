import { execFile } from 'node:child_process';
import { appendFile, chown, mkdtemp, rm, stat, statfs } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { type EmbeddedPostgres, type ShutdownMode, startEmbeddedPostgres } from '@leasehold/embedded-postgres';
import { Client } from 'pg';

const run = promisify(execFile);
const SPACE_MB = 2048;
const SPARE_KB = 8192;

/** The database of a campaign. */
export interface Store {
  readonly url: string;
  restart(mode: ShutdownMode): Promise<void>;
  /** Leaves no disk to its tables until `until` has resolved. Only where a file system of our own can be had. */
  fillDisk?(until: () => Promise<void>): Promise<void>;
  stop(): Promise<void>;
}

/** A server of its own; as root on Linux with its tables on a small file system of their own, which can be full without harm to the machine. */
export async function openStore(): Promise<Store> {
  const server = await startEmbeddedPostgres({ settings: { max_connections: '200' } });
  const space = await mountSpace(server).catch(() => undefined);
  try {
    await query(server.url, space ? `CREATE TABLESPACE chaos LOCATION '${space}'` : 'SELECT 1');
    await query(server.url, `CREATE DATABASE chaos ${space ? 'TABLESPACE chaos' : ''}`);
  } catch (error) {
    await server.stop();
    if (space) await unmount(space);
    throw error;
  }
  const url = new URL(server.url);
  url.pathname = '/chaos';
  return {
    url: url.href,
    restart: (mode) => server.restart(mode),
    ...(space && { fillDisk: (until) => fillDisk(space, until) }),
    stop: async () => {
      await server.stop();
      if (space) await unmount(space);
    },
  };
}

async function query(url: string, sql: string): Promise<void> {
  const client = new Client({ connectionString: url });
  await client.connect();
  await client.query(sql).finally(() => client.end());
}

/** @throws where nothing can be mounted: not Linux, not root, or not allowed */
async function mountSpace({ dataDir }: EmbeddedPostgres): Promise<string> {
  const folder = await mkdtemp(join(tmpdir(), 'leasehold-chaos-'));
  try {
    await run('mount', ['-t', 'tmpfs', '-o', `size=${SPACE_MB}m`, 'tmpfs', folder]);
  } catch (error) {
    await rm(folder, { recursive: true });
    throw error;
  }
  const { uid, gid } = await stat(dataDir);
  await chown(folder, uid, gid);
  return folder;
}

async function unmount(folder: string): Promise<void> {
  await run('umount', [folder]).catch(() => run('umount', ['-l', folder]));
  await rm(folder, { recursive: true });
}

/** It is made little larger than what it holds, and the rest is filled. (Made smaller than that, it refuses.) */
async function fillDisk(folder: string, until: () => Promise<void>): Promise<void> {
  const { blocks, bfree, bsize } = await statfs(folder);
  const usedKb = Math.ceil(((blocks - bfree) * bsize) / 1024);
  const filler = join(folder, 'filler');
  await run('mount', ['-o', `remount,size=${usedKb + SPARE_KB}k`, folder]);
  try {
    for (const chunk of [Buffer.alloc(65_536), Buffer.alloc(4096)]) await fill(filler, chunk);
    await until();
  } finally {
    await rm(filler, { force: true });
    await run('mount', ['-o', `remount,size=${SPACE_MB}m`, folder]);
  }
}

/** Until nothing more of it goes in. */
async function fill(file: string, chunk: Buffer): Promise<void> {
  for (let full = false; !full;) {
    await appendFile(file, chunk).catch((error: NodeJS.ErrnoException) => {
      if (error.code !== 'ENOSPC') throw error;
      full = true;
    });
  }
}
