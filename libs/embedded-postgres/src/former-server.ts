import { execFile } from 'node:child_process';
import { readFileSync, readlinkSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import { EmbeddedPostgresError, errnoOf } from './errors';
import { disownPostmasterFile, readPostmasterFile } from './postmaster-file';

// Time to see that a server is being stopped, and then for its last checkpoint.
const NOTICE_MS = 2_000;
const STOP_MS = 60_000;
const POLL_MS = 50;

/**
 * Makes sure that no server runs on a kept data folder. One that is just being stopped (by the guard of a killed
 * process) is waited for. A leftover `postmaster.pid` whose id now belongs to another program, as happens in containers
 * with their small ids, would make PostgreSQL refuse to start: it is disowned.
 */
export async function waitForFormerServer(dataDir: string): Promise<void> {
  for (const began = performance.now(); ; await sleep(POLL_MS)) {
    const file = readPostmasterFile(dataDir);
    if (file === undefined || !isAlive(file.pid)) return;
    if (!(await isServerOf(dataDir, file.pid))) return disownPostmasterFile(dataDir);
    if (performance.now() - began > (file.status === 'stopping' ? STOP_MS : NOTICE_MS)) {
      throw new EmbeddedPostgresError(
        'DATA_DIR_IN_USE',
        `A PostgreSQL server (process ${file.pid}) already runs on ${dataDir}: stop it, or use another folder.`,
      );
    }
  }
}

function isAlive(pid: number): boolean {
  try {
    process.kill(pid, 0);
    return true;
  } catch (error) {
    return errnoOf(error) === 'EPERM';
  }
}

/** On doubt yes: the file of a live server must not be touched, it would shut itself down. */
async function isServerOf(dataDir: string, pid: number): Promise<boolean> {
  const folder = workingFolderOf(pid);
  if (folder !== undefined && folder !== dataDir) return false;
  return /(^|[/\s])postgres(\s|:|$)/.test(await commandOf(pid));
}

/** Every process of a server works in its data folder; undefined where the system does not tell. */
function workingFolderOf(pid: number): string | undefined {
  try {
    return readlinkSync(`/proc/${pid}/cwd`);
  } catch {
    return undefined;
  }
}

function commandOf(pid: number): Promise<string> {
  if (process.platform === 'linux') {
    try {
      // Small images have no ps.
      return Promise.resolve(readFileSync(`/proc/${pid}/cmdline`, 'utf8').replaceAll('\0', ' '));
    } catch {
      return Promise.resolve('');
    }
  }
  return new Promise((resolve) => {
    execFile('ps', ['-p', String(pid), '-o', 'command='], (error, stdout) => resolve(error === null ? stdout : ''));
  });
}
