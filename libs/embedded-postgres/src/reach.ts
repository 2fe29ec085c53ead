import type { Account } from './account';
import { run } from './run';

/** Whether an account can enter a folder and write in it: its parents may be private to another. */
export async function canUse(folder: string, account: Account | undefined): Promise<boolean> {
  try {
    await run('/bin/sh', ['-c', 'cd "$1" && test -w .', 'sh', folder], { account, cwd: '/' });
    return true;
  } catch {
    return false;
  }
}
