import { lchownSync, lstatSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import type { Account } from './account';

/** Makes a path, and all below it, belong to an account; nothing to do without one (we are not root). */
export function giveTo(path: string, account: Account | undefined): void {
  if (account === undefined) return;
  lchownSync(path, account.uid, account.gid);
  if (!lstatSync(path).isDirectory()) return;
  for (const name of readdirSync(path)) giveTo(join(path, name), account);
}
