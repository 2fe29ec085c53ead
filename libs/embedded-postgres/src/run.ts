import { execFile } from 'node:child_process';
import type { Account } from './account';

/** Where and as whom a program of PostgreSQL runs. */
export interface RunContext {
  account: Account | undefined;
  /** A folder that the account can reach; the current one may be private to root. */
  cwd: string;
}

/** PG* variables of the caller (PGDATA, PGPORT, PGOPTIONS…) must not steer this server; messages are matched in English. */
export function serverEnvironment(): NodeJS.ProcessEnv {
  const kept = Object.entries(process.env).filter(([name]) => !name.startsWith('PG'));
  return { ...Object.fromEntries(kept), LC_ALL: 'C' };
}

/** Runs a program to its end; resolves with its stdout, rejects with what it wrote. */
export function run(file: string, args: string[], { account, cwd }: RunContext): Promise<string> {
  return new Promise((resolve, reject) => {
    execFile(file, args, { ...account, cwd, env: serverEnvironment() }, (error, stdout, stderr) => {
      if (error === null) resolve(stdout);
      else reject(new Error(`${error.message}\n${stderr}`.trim()));
    });
  });
}
