/** The writing systems that are told apart; letters of all others count as 'Other'. */
const SCRIPTS: [name: string, letters: RegExp][] = [
  ['Latin', /\p{Script=Latin}/u],
  ['Cyrillic', /\p{Script=Cyrillic}/u],
  ['Greek', /\p{Script=Greek}/u],
  ['Han', /\p{Script=Han}/u],
  ['Kana', /[\p{Script=Hiragana}\p{Script=Katakana}]/u],
  ['Hangul', /\p{Script=Hangul}/u],
  ['Arabic', /\p{Script=Arabic}/u],
  ['Hebrew', /\p{Script=Hebrew}/u],
  ['Devanagari', /\p{Script=Devanagari}/u],
  ['Thai', /\p{Script=Thai}/u],
];

/** Letters outside ASCII repeat a lot, and asking ten patterns for each is slow. */
const known = new Map<string, string | undefined>();
const MAX_KNOWN = 20_000;

/** How many letters of each writing system a text has. */
export function countScripts(text: string): Record<string, number> {
  const counts: Record<string, number> = {};
  let latin = 0;
  for (const char of text) {
    const code = char.charCodeAt(0);
    if (code < 128) {
      if ((code > 64 && code < 91) || (code > 96 && code < 123)) latin++;
      continue;
    }
    const script = scriptOf(char);
    if (script !== undefined) counts[script] = (counts[script] ?? 0) + 1;
  }
  if (latin > 0) counts.Latin = (counts.Latin ?? 0) + latin;
  return counts;
}

function scriptOf(char: string): string | undefined {
  if (known.has(char)) return known.get(char);
  const script = SCRIPTS.find(([, letters]) => letters.test(char))?.[0] ?? (/\p{L}/u.test(char) ? 'Other' : undefined);
  if (known.size < MAX_KNOWN) known.set(char, script);
  return script;
}

/** A word is a run of letters and digits; in scripts that write without spaces every character counts as one. */
export function countWords(text: string): number {
  const word = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}]|[\p{L}\p{N}][\p{L}\p{N}\p{M}'’_-]*/gu;
  let count = 0;
  while (word.test(text)) count++;
  return count;
}
